"""`RunPaths` owns the names of a run directory: against the documented table, and against every other module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.base.run_paths import (
    AHEAD,
    AHEAD_JSON,
    EVALUATION,
    EXPORT,
    MARKER,
    LogPaths,
    RunPaths,
    discarded,
    is_discarded,
    step_in,
    step_name,
)
from tests.structure import module
from tests.test_architecture import ROOT, all_modules, show

OWNER = ROOT / "ctpo_megatron" / "base" / "run_paths.py"
PATHS, LOGS = RunPaths(Path()), LogPaths(Path())
FILES = {
    *(name for name in RunPaths.names() if "." in name),
    *(path.name for path in (LOGS.train, LOGS.sandbox, PATHS.stall_report)),
    *(MARKER, AHEAD, AHEAD_JSON),
}
FOLDERS = {name for name in RunPaths.names() if "." not in name}
PARTS = ("discarded_", "rollout_engine_", "model-step_", "step_", "rank_")
"""Beginnings of names that are made of a number or another name."""


# --- the names -----------------------------------------------------------------------------------------------------


def documented() -> set[str]:
    """The first column of the table in docs/architecture.md, without the slash of folders."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = page.partition("## A run directory\n")[2].splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return {name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_documented_table_has_every_entry_and_no_other() -> None:
    entries = {name.partition("/")[0] for name in documented()}
    assert entries == {*RunPaths.names(), EXPORT, "model-step_%06d"}


def test_the_documented_table_has_what_lies_in_folders() -> None:
    dumps = [PATHS.dump(1), PATHS.dump(1, EVALUATION)]
    checkpoints = [PATHS.checkpoints / step_name(1), PATHS.sft_checkpoints, PATHS.checkpoint_export(Path(step_name(1)))]
    logs = [PATHS.logs.train, PATHS.logs.sandbox]
    numbered = {str(path).replace("1", "%d") for path in (PATHS.logs.engine(1), PATHS.stacks(1))}
    assert numbered | {str(path).replace("000001", "%06d") for path in (*dumps, *checkpoints, *logs)} <= documented()


def test_a_run_writes_the_names_that_no_export_may_have() -> None:
    """The names that were listed by hand before: one that is forgotten would be deleted by an export."""
    listed = "config.yaml config.previous.yaml data.json environment.json extensions extensions.json figures logs wandb"
    rows = "rendering.json positions.jsonl discarded_positions.jsonl sft_model sft_model.json profile trajectories.html"
    others = "extensions.previous heartbeat.json metrics.jsonl owner.lock sft.jsonl stages.json stalls report.html"
    folders = "trajectories evaluation checkpoints tensorboard trackers discarded_metrics.jsonl discarded_sft.jsonl"
    assert RunPaths.names() == set(f"{listed} {rows} {others} {folders}".split())


def test_the_nodes_of_a_job_write_outside() -> None:
    assert RunPaths(Path("runs/first")).nodes == Path("runs/first.nodes")


@pytest.mark.parametrize("step", [0, 12, 1_234_567])
def test_a_step_is_read_back_from_its_name(step: int) -> None:
    assert step_in(step_name(step)) == step


@pytest.mark.parametrize("name", ["step_12", "step_000012.old", "mine", "discarded_step_000012", ".step_000012", ""])
def test_other_names_have_no_step(name: str) -> None:
    assert step_in(name) is None


def test_what_is_discarded_says_so() -> None:
    path = discarded(PATHS.dump(3))
    assert path == Path("trajectories/discarded_step_000003.parquet")
    assert is_discarded(path) and not is_discarded(PATHS.dump(3))


def test_a_tracker_of_users_has_a_plain_name() -> None:
    assert PATHS.tracker("my.module:Name").name == "my.module_Name.json"


def test_exports_of_checkpoints_are_found_again(tmp_path: Path) -> None:
    written = RunPaths(tmp_path).checkpoint_export(tmp_path / "checkpoints" / step_name(5))
    written.mkdir()
    (tmp_path / EXPORT).mkdir()
    assert list(RunPaths(tmp_path).checkpoint_exports()) == [written]


# --- and no other module spells them ---------------------------------------------------------------------------------


def spelled(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each literal that is a name of a run directory, or a path with one. Prose has spaces."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    joined = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    of_paths = {id(part) for node in nodes for part in _used_as_path(node)}
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        first, *rest = node.value.split("/")
        names = {first, *rest}
        if re.search(r"\s", node.value):
            continue
        is_path = id(node) in of_paths
        in_folder = first in FOLDERS and (rest or is_path)
        begins = (id(node) in joined or is_path) and node.value.startswith(PARTS)
        if names & FILES or in_folder or begins:
            yield node.lineno, node.value


def _used_as_path(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in {"Path", "joinpath", "with_name", "glob", "rglob"}:
            yield from node.args


def test_no_other_module_spells_a_name_of_a_run_directory() -> None:
    wrong = [
        show(path, line, text) for path in all_modules() if path != OWNER for line, text in spelled(module(path).nodes)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "code",
    [
        'directory / "logs"',
        'Path("logs") / name',
        'FILE = "metrics.jsonl"',
        'path.glob("checkpoints/step_*/COMPLETE.json")',
        'path / f"step_{step:06d}.jsonl"',
        'path.glob("model-step_*")',
        'path.with_name(f"discarded_{path.name}")',
    ],
)
def test_a_spelled_name_is_noticed(code: str) -> None:
    assert list(spelled(list(ast.walk(ast.parse(code)))))


@pytest.mark.parametrize(
    "code",
    ['"""Writes metrics.jsonl."""', 'log("see metrics.jsonl")', 'display.stage("evaluation")', 'f"{count}_step"'],
)
def test_prose_and_other_words_are_not(code: str) -> None:
    assert list(spelled(list(ast.walk(ast.parse(code))))) == []
