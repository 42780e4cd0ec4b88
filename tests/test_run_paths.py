"""`RunPaths` owns the names of a run directory: against the documented table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctpo_megatron.base.run_paths import EVALUATION, EXPORT, RunPaths, discarded, is_discarded, step_in, step_name
from tests.test_links import ROOT

PATHS = RunPaths(Path())


def documented() -> set[str]:
    """The first column of the table in docs/reference/run_directory.md, without the slash of folders."""
    page = (ROOT / "docs" / "reference" / "run_directory.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
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
