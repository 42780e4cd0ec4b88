"""Traces of the trainer's ranks: `run.profile_steps`."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.run import TrainerGroup
from tests.run import ranks_scenario
from tests.run.scripted_run import ONE_RANK
from tests.support import ranks
from tests.tracking.synthetic_run import make_config

pytestmark = pytest.mark.xdist_group("ranks")


def ranges_of(path: Path) -> dict[str, dict[str, Any]]:
    """The named ranges of a trace: what is annotated, and not an operator."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"]: event for event in events if event.get("cat") == "user_annotation"}


def covers(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


@pytest.fixture
def group(tmp_path: Path) -> TrainerGroup:
    stop: Any = None
    return TrainerGroup(make_config(tmp_path), ONE_RANK, stop)


def test_phases_are_ranges_of_the_step_with_their_operators(group: TrainerGroup, tmp_path: Path) -> None:
    phases, path = group.phases, RunPaths(tmp_path).trace(7, 0)
    assert phases.mark is nullcontext  # nothing is marked where nothing is recorded
    with phases.phase("before"):
        torch.ones(3)
    group.begin_trace(7)
    with phases.phase("update"), phases.phase("inner"):
        torch.mm(torch.ones(3, 3), torch.ones(3, 3))
    group.end_trace(7, tmp_path)
    assert phases.mark is nullcontext
    with phases.phase("after"):
        torch.ones(3)
    found = ranges_of(path)
    assert found.keys() == {"step_000007", "time/update", "time/inner"}
    assert covers(found["step_000007"], found["time/update"]) and covers(found["time/update"], found["time/inner"])
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    [product] = [event for event in events if event.get("name") == "aten::mm"]
    assert covers(found["time/inner"], product)
    assert phases.metrics().keys() >= {"time/update", "time/inner"}


def test_a_trace_that_is_too_large_for_viewers_is_said(
    group: TrainerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ctpo_megatron.run.trace.LARGEST", 10)
    group.begin_trace(1)
    group.end_trace(1, tmp_path)
    [record] = caplog.records
    assert str(RunPaths(tmp_path).trace(1, 0)) in record.getMessage() and "docs/monitoring.md" in record.getMessage()


def test_a_trace_that_cannot_be_written_is_said(
    group: TrainerGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file")
    group.begin_trace(1)
    group.end_trace(1, tmp_path)
    [record] = caplog.records
    assert f"no trace at {RunPaths(tmp_path).trace(1, 0)}: " in record.getMessage()


def test_every_rank_writes_its_own(tmp_path: Path) -> None:
    ranks.run(ranks_scenario.main, tmp_path, "traced", ranks=2)
    folder = RunPaths(tmp_path).profile
    assert sorted(path.name for path in folder.iterdir()) == [f"step_000002_rank_{n}.json.gz" for n in (0, 1)]
    for path in folder.iterdir():
        ours = {name for name in ranges_of(path) if not name.startswith("gloo:")}  # of commands and collectives
        assert ours == {"step_000002", "time/save"}
