"""The paper's recipes: every value of the paper, and a place on their GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron.cli import main
from ctpo_megatron.config import Config, load_config
from tests.support.prefork import ROOT

CONFIGS = ROOT / "configs"
MODELS = ("4b", "14b")
OBJECTIVES = sorted(path.name for path in (CONFIGS / "objectives").glob("*.yaml"))
NODES = {"nodes_2x8.yaml": 8, "nodes_8x8.yaml": 32}  # trainer ranks, 4 a node


def recipe(model: str) -> str:
    return str(CONFIGS / f"qwen3_{model}_tir.yaml")


def value(config: Config, key: str) -> Any:
    node: Any = config.model_dump(mode="json")
    for name in key.split("."):
        node = node[name]
    return node


@pytest.mark.parametrize("model", MODELS)
def test_every_value_is_the_papers(model: str) -> None:
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("## The setting")[1]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) >= 28
    config = load_config(recipe(model))
    different = {key: value(config, key) for key, text in rows if value(config, key) != yaml.safe_load(text)}
    assert different == {}


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(model: str, ranks: int, *files: str, ranks_of_a_node: int = 8) -> str:
        monkeypatch.chdir(tmp_path)  # neither model nor data are here
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_a_node))
        shapes = str(CONFIGS / "models" / f"qwen3_{model}.json")
        further = [str(CONFIGS / file) for file in files]
        status = main(["train", recipe(model), *further, "--dry-run", "--cuda", "--shapes", shapes])
        shown = capsys.readouterr()
        assert status == 0, shown.err
        assert shown.err == ""
        return shown.out

    return run


@pytest.mark.parametrize("model", MODELS)
def test_it_fits_one_node_of_eight(model: str, dry_run: Any) -> None:
    shown = dry_run(model, 8)
    assert re.search(r"optimizer steps +4,880", shown)
    assert "Memory of each GPU on CUDA, colocated" in shown


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("file", NODES)
def test_it_fits_several_nodes(model: str, file: str, dry_run: Any) -> None:
    shown = dry_run(model, NODES[file], file, ranks_of_a_node=4)
    assert "Memory of each GPU on CUDA, disaggregated" in shown


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


def test_shapes_are_for_dry_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe("4b"), "--shapes", str(CONFIGS / "models" / "qwen3_4b.json")]) == 2
    assert "--shapes is for --dry-run" in capsys.readouterr().err
