"""Every key of the schema that names files is marked, and nothing that a run reads is deleted by `run.overwrite`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from ctpo_megatron.config import Config, dump, load_config
from ctpo_megatron.config.reads import Reads
from ctpo_megatron.run import RunDirectoryError, open_run_directory

TEXT_WITHOUT_PATH = {
    "run.name",
    "rollout.stop",
    "run.root",  # the parent of what is written
    "model.chat_template_kwargs",
    "checkpoint.best_metric",
    "export.directory",
    "cluster.node_address",
    "sandbox.url",
    "sandbox.warm",
    "reward.function.name",  # the file of a user's part is found by importing it
}
"""Keys that hold text, and no path that a run reads."""
SUFFIX = {"data.system_prompt": ".md", "model.chat_template": ".jinja"}
SECTIONS: dict[str, dict[str, Any]] = {
    "sft": {"data": ["sft.parquet"], "steps": 1},
}
"""What a section that may be absent needs besides the key in question."""


def text_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Dotted key, annotation and whether it is marked, of keys that may hold text; one Extension stands for all."""
    for name, field in section.model_fields.items():
        key, inner = f"{prefix}{name}", _section(field.annotation)
        if inner is None:
            if _holds(field.annotation, str) or _holds(field.annotation, Any):
                yield key, field.annotation, any(isinstance(mark, Reads) for mark in field.metadata)
        elif inner.__name__ != "Extension" or key == "reward.function":
            yield from text_keys(inner, f"{key}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    kinds = [annotation, *get_args(annotation), *(part for kind in get_args(annotation) for part in get_args(kind))]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _holds(annotation: Any, kind: Any) -> bool:
    return annotation is kind or any(_holds(part, kind) for part in get_args(annotation))


KEYS = list(text_keys(Config))
MARKED = [(key, annotation) for key, annotation, marked in KEYS if marked]


def values(root: Path, key: str, value: Any) -> dict[str, Any]:
    """A configuration of run `x` in `root`, which reads `value` by `key`."""
    tree: dict[str, Any] = {
        "run": {"root": str(root), "name": "x", "steps": 1, "overwrite": True},
        "model": {"path": "model"},
        "data": {"train": ["train.parquet"]},
    }
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, dict(SECTIONS.get(section, {})))
    node[last] = value
    if key == "reward.function.arguments":
        node["name"] = "math_verify"
    return tree


def started_run(root: Path) -> Path:
    """The directory of an earlier run."""
    (root / "x").mkdir(parents=True)
    (root / "x" / "config.yaml").write_text("run: {name: x, steps: 1}\n")
    return root / "x"


def test_every_text_of_the_schema_is_a_path_or_known_to_be_none() -> None:
    assert {key for key, _, marked in KEYS if not marked} == TEXT_WITHOUT_PATH


@pytest.mark.parametrize(("key", "annotation"), MARKED, ids=[key for key, _ in MARKED])
def test_overwrite_refuses_to_delete_what_a_key_reads(key: str, annotation: Any, tmp_path: Path) -> None:
    mine = started_run(tmp_path / "runs") / f"mine{SUFFIX.get(key, '')}"
    mine.write_text("mine")
    value: Any = {"file": str(mine)} if _holds(annotation, Any) else str(mine)
    config = Config.model_validate(values(tmp_path / "runs", key, [value] if "tuple" in str(annotation) else value))
    with pytest.raises(RunDirectoryError, match=f"would delete what this run needs: .*{mine.name}"):
        open_run_directory(config)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(("key", "annotation"), MARKED, ids=[key for key, _ in MARKED])
def test_a_tilde_is_the_home_directory(
    key: str, annotation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    mine = f"~/mine{SUFFIX.get(key, '')}"
    real = Path(mine).expanduser()
    real.parent.mkdir()
    real.touch()
    value: Any = {"file": mine, "files": [mine], "text": "~/none"} if _holds(annotation, Any) else mine
    config = Config.model_validate(values(tmp_path, key, [value] if "tuple" in str(annotation) else value))
    assert real in [path for name, path in config.inputs() if name.startswith(key)]
    assert "~/mine" not in (dumped := dump(config, whole=True))
    assert not isinstance(value, dict) or "text: ~/none" in dumped


def test_a_tilde_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "my.yaml").write_text(
        "run: {root: ~/runs, name: y, steps: 1}\nmodel: {path: ~/m}\n"
        "data: {train: [{path: '~/a*', weight: 1}, {path: '${run.root}/b', weight: 1}]}\n"
    )
    config = load_config(tmp_path / "my.yaml")
    home = tmp_path / "home"
    assert config.run.directory == home / "runs" / "y" and config.model.path == str(home / "m")
    assert config.data.train_files == (str(home / "a*"), str(home / "runs" / "b"))
    assert load_config(tmp_path / "my.yaml", ["run.root=~nobody-of-this-name/runs"]).run.root.startswith("~")


@pytest.mark.parametrize("pattern", ["x/*.parquet", "*/part.parquet", "**/part.parquet"])
def test_a_pattern_is_followed_to_what_it_matches(pattern: str, tmp_path: Path) -> None:
    part = started_run(tmp_path / "runs") / "part.parquet"
    part.touch()
    config = Config.model_validate(values(tmp_path / "runs", "data.train", [str(tmp_path / "runs" / pattern)]))
    with pytest.raises(RunDirectoryError, match=r"would delete what this run needs: .*\.parquet"):
        open_run_directory(config)
    assert part.exists()


def test_text_that_is_no_file_is_not_taken_for_one(tmp_path: Path) -> None:
    directory = started_run(tmp_path / "runs")
    text = f"{directory}/You are careful.\nAnswer in one word."
    open_run_directory(Config.model_validate(values(tmp_path / "runs", "data.system_prompt", text)))


@pytest.mark.parametrize("base", ["", "base.yaml"])
def test_overwrite_refuses_to_delete_the_configuration_itself(base: str, tmp_path: Path) -> None:
    directory = started_run(tmp_path / "runs")
    run = f"{{root: {tmp_path / 'runs'}, name: x, steps: 1, overwrite: true}}"
    given = f"run: {run}\nmodel: {{path: m}}\ndata: {{train: [t]}}\n"
    mine = directory / (base or "my.yaml")
    mine.write_text(given)
    top = mine
    if base:
        top = tmp_path / "my.yaml"
        top.write_text(f"defaults: runs/x/{base}\n")
    with pytest.raises(RunDirectoryError, match=f"would delete what this run needs: .*{mine.name}"):
        open_run_directory(load_config(top))
    assert mine.read_text() == given
