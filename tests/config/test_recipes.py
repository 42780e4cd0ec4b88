"""The recipes: every value of the paper, a place on their GPUs, and data that the page's commands make."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ctpo_megatron.config import load_config, read_shapes
from examples.prepare_data.__main__ import main as prepare_data
from tests.support.command import Invoke
from tests.support.prefork import ROOT

CONFIGS = ROOT / "configs"
MODELS = ("4b", "14b")
OBJECTIVES = sorted(path.name for path in (CONFIGS / "objectives").glob("*.yaml"))
NODES = {"nodes_2x8.yaml": 8, "nodes_8x8.yaml": 32}  # trainer ranks, 4 a node


PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
ONE_GPU = {"0_6b": 24, "1_7b": 80}


def recipe(model: str) -> str:
    return str(CONFIGS / f"qwen3_{model}_tir.yaml")


def leaves(settings: dict[str, Any]) -> dict[str, Any]:
    """The values of nested settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        inner = leaves(value) if isinstance(value, dict) else {}
        flat |= {f"{key}.{name}": found for name, found in inner.items()} or {key: value}
    return flat


@pytest.mark.parametrize("model", MODELS)
def test_every_value_is_the_papers(model: str) -> None:
    block = re.search(r"^```yaml\n(.*?)^```$", PAGE.split("## Settings of both recipes")[1], re.MULTILINE | re.DOTALL)
    assert block is not None
    paper, config = leaves(yaml.safe_load(block[1])), leaves(load_config(recipe(model)).model_dump(mode="json"))
    assert len(paper) >= 35
    assert {key: value for key, value in paper.items() if config.get(key, "no such key") != value} == {}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, invoke: Invoke) -> Any:
    """What a dry run for CUDA shows of a model, whose shapes alone are here; it has nothing to say against it."""

    def run(model: str, *words: str) -> str:
        monkeypatch.chdir(tmp_path)  # neither model nor data are here
        shapes = str(CONFIGS / "models" / f"qwen3_{model}.json")
        status, out, err = invoke("train", *words, "--dry-run", "-v", "--cuda", "--shapes", shapes)
        assert (status, err) == (0, "")
        return out

    return run


def job(monkeypatch: pytest.MonkeyPatch, ranks: int, ranks_of_a_node: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_a_node))


@pytest.mark.parametrize("model", MODELS)
def test_it_fits_one_node_of_eight(model: str, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, 8, 8)
    shown = planned(model, recipe(model))
    assert re.search(r"  run +\d+ steps .*\n.*\n  a step +\d+ updates ", shown)
    assert "Memory of each GPU on CUDA, colocated" in shown


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("file", NODES)
def test_it_fits_several_nodes(model: str, file: str, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, NODES[file], 4)
    assert "Memory of each GPU on CUDA, disaggregated" in planned(model, recipe(model), str(CONFIGS / file))


@pytest.mark.parametrize("file", OBJECTIVES)
def test_an_objective_changes_the_objective_alone(file: str) -> None:
    plain = load_config(recipe("14b"))
    changed = load_config(recipe("14b"), [str(CONFIGS / "objectives" / file)])
    preset = file.removesuffix(".yaml").replace("_", "-")
    assert changed.run.name == f"qwen3_14b_tir-{preset}"
    objective = plain.objective.model_copy(update={"preset": preset})
    run = plain.run.model_copy(update={"name": changed.run.name})
    assert changed == plain.model_copy(update={"objective": objective, "run": run})


def test_further_files_and_keys_win_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {seed: 3, steps: 7}\n")
    file = str(tmp_path / "a.yaml")
    config = load_config(recipe("4b"), ["run.seed=1", file, "run.steps=9"])
    assert (config.run.seed, config.run.steps) == (3, 9)


def test_shapes_are_for_dry_runs(invoke: Invoke) -> None:
    status, _, err = invoke("train", recipe("4b"), "--shapes", str(CONFIGS / "models" / "qwen3_4b.json"))
    assert status == 2 and "--shapes is for --dry-run" in err


def test_shapes_are_found_by_name_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, invoke: Invoke) -> None:
    """A model that is not here: the message says how to plan without it, and each name that it gives works."""
    monkeypatch.chdir(tmp_path)
    words = ["train", str(CONFIGS / "qwen3_0_6b_one_gpu.yaml"), "--dry-run"]
    status, _, err = invoke(*words, "--cuda")
    (line,) = [line for line in err.splitlines() if "model.path = " in line]
    assert status == 2
    names = re.findall(
        r"\w+\.json", line.partition("or plan without it: --shapes FILE (")[2].partition("config.json")[0]
    )
    assert names == sorted(file.name for file in (CONFIGS / "models").glob("*.json"))
    status, _, err = invoke(*words)
    assert status == 2 and "--shapes" not in err  # its answer is about GPUs
    for name in (*names, "qwen3_0_6b", "models/qwen3_0_6b.json", "configs/models/qwen3_0_6b.json"):
        assert read_shapes(name) == read_shapes(CONFIGS / "models" / f"{Path(name).stem}.json")
    assert invoke(*words, "--cuda", "--shapes", "qwen3_0_6b.json").status == 0
    status, _, error = invoke(*words, "--cuda", "--shapes", "qwen3_06b.json")
    assert status == 2
    assert "no such .json file" in error and "did you mean" in error and ".yaml" not in error


@pytest.mark.parametrize(("model", "gib"), [("0_6b", 24), ("0_6b", 80), ("1_7b", 80)])
def test_it_fits_one_card(model: str, gib: int, planned: Any) -> None:
    shown = planned(model, str(CONFIGS / f"qwen3_{model}_one_gpu.yaml"), "--gpu-gib", str(gib))
    assert "GPU 0, in an update" in shown
    if gib == ONE_GPU[model]:
        (fullest,) = re.findall(r"^  GPU 0, in an update +([\d.]+) GiB", shown, re.MULTILINE)
        assert f"| `configs/qwen3_{model}_one_gpu.yaml` | {gib} | {fullest} |" in PAGE


def commands() -> list[list[str]]:
    """The words of every command that brings models or data."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def after(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


def test_what_the_recipes_read_is_what_the_commands_of_the_page_write() -> None:
    """USR-8."""
    options = {"hf": "--local-dir", "python": "--output"}
    written = {after(options[words[0]], words) for words in commands()}
    read = set()
    for file in CONFIGS.glob("qwen3_*.yaml"):
        config = load_config(str(file))
        read |= {config.model.path, *config.data.train, *config.data.eval}
    assert read <= written
    assert {path for path in written - read if not path.startswith("data/raw/")} == set()


def test_the_commands_make_the_data_of_rows_with_the_columns_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the downloads."""
    monkeypatch.chdir(tmp_path)
    copied = "How many positive integers below one thousand are divisible by both of the numbers seven and eleven?"
    for words in commands():
        if words[0] == "hf":
            folder = tmp_path / after("--local-dir", words)
            row = {"problem_idx": 1, "problem": f"{copied} {folder.name}", "answer": "12", "problem_type": ["x"]}
            if folder.name == "deepscaler":
                folder.mkdir(parents=True)
                rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n), "solution": ""} for n in range(3, 9)]
                (folder / "deepscaler.json").write_text(json.dumps([*rows, {**rows[0], **row}]))
            elif "--repo-type" in words:
                (folder / "data").mkdir(parents=True)
                pq.write_table(pa.Table.from_pylist([row]), folder / "data" / "train-00000-of-00001.parquet")
            continue
        assert words[:3] == ["python", "-m", "examples.prepare_data"]
        assert prepare_data(words[3:]) == 0, capsys.readouterr().err
        assert pq.read_table(after("--output", words)).num_rows == (6 if "deepscaler" in words else 1)
    report = json.loads((tmp_path / "data" / "deepscaler" / "train.report.json").read_text())
    assert [dropped["reason"] for dropped in report["rows"]] == ["contaminated"]
