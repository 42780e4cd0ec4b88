"""What has left is refused with a sentence that names what takes its place; in a stored configuration it is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ctpo_megatron import cli
from ctpo_megatron.config import ConfigError, load_config
from ctpo_megatron.config.removed import KEYS, OPTIONS, VALUES, VERBS
from tests.support.prefork import ROOT

MINIMAL = {
    "run": {"name": "first", "steps": 4},
    "model": {"path": "model"},
    "sft": {"data": ["sft.parquet"], "steps": 1},
    "data": {"train": ["train.parquet"], "max_prompt_tokens": 64},
    "policy": {"micro_batch_tokens": 1024},
    "rollout": {"max_response_tokens": 176, "engine": {"max_model_len": 256, "kv_cache_mb": 64, "dtype": "float32"}},
}

REQUIRED = {"sweep": ["--grid", "run.seed=0"]}
"""Verb of `ctpo` -> options that it does not do without."""


def with_value(key: str, value: object) -> dict[str, object]:
    tree: dict[str, object] = yaml.safe_load(yaml.safe_dump(MINIMAL))
    *sections, name = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})  # type: ignore[assignment]
    node[name] = value
    return tree


def written(folder: Path, name: str, tree: object) -> Path:
    file = folder / name
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ["text", {"inner": 1}], ids=["leaf", "section"])
def test_a_removed_key_is_refused_by_file_and_line(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "mine.yaml", with_value(key, value)))
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith("mine.yaml:") or "mine.yaml:" in problem
    assert f"{key}: removed; {KEYS[key]}" in problem


def test_the_changelog_has_the_same_table() -> None:
    rows = dict(KEYS)
    rows |= {f"{key}: {value}": text for (key, value), text in VALUES.items()}
    rows |= {f"ctpo {verb}": text for verb, text in VERBS.items()}
    rows |= {f"ctpo {verb} {option}": text for (verb, option), text in OPTIONS.items()}
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not [row for row in (f"| `{name}` | {instead} |" for name, instead in rows.items()) if row not in text]


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_removed_value_is_refused(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "mine.yaml", MINIMAL), [f"{key}={value}"])
    (problem,) = map(str, caught.value.problems)
    assert f"removed; {VALUES[key, value]}" in problem


@pytest.mark.parametrize(("key", "value"), [*((key, {"inner": 1}) for key in KEYS), *VALUES])
def test_a_stored_configuration_with_it_is_read(key: str, value: object, tmp_path: Path) -> None:
    stored = written(tmp_path, "config.yaml", with_value(key, value))
    (tmp_path / "environment.json").write_text("{}", encoding="utf-8")
    assert load_config(stored) == load_config(written(tmp_path, "plain.yaml", MINIMAL)).read_from([stored])


@pytest.mark.parametrize("words", [[verb] for verb in VERBS] + [[*key] for key in OPTIONS], ids=" ".join)
def test_a_removed_verb_or_option_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    verb, *option = words
    instead = OPTIONS[verb, option[0]] if option else VERBS[verb]
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "runs/x", *REQUIRED.get(verb, []), *option])
    assert ended.value.code == 2
    assert f"{' '.join(words)} was removed: {instead}" in " ".join(capsys.readouterr().err.split())
