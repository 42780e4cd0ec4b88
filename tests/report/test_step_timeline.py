"""The time line of a traced step: one clock for all files, the phases of ranks, and when engines sample."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.tool_call import ToolCall
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.report import step_timeline as module
from ctpo_megatron.report.step_timeline import step_timeline
from ctpo_megatron.tracking import write_trajectories
from ctpo_megatron.tracking.trajectories import Form

RANK, ENGINE = "step_000004_rank_{}.json.gz", "step_000004_engine_{}_rank0.17.pt.trace.json.gz"


def write(run: Path, name: str, ranges: list[tuple[str, float, float]], base: float = 1000.0) -> None:
    """A trace whose times are seconds since `base`, with an operator that is in no range of ours."""
    folder = RunPaths(run).profile
    folder.mkdir(exist_ok=True)
    events = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0}] + [
        {"cat": "user_annotation", "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for name, start, end in ranges
    ]
    trace = {"baseTimeNanoseconds": int(base * 1e9), "traceEvents": events}
    (folder / name).write_bytes(gzip.compress(json.dumps(trace).encode()))


def trajectory(*calls: tuple[float, float], scored: tuple[float, float] | None = None) -> Trajectory:
    """Calls and scoring from and to these Unix times."""
    made = Trajectory("p", 0, 0, finish_reason="answer", reward=1.0, scored_at=None if scored is None else [*scored])
    made.append_context([1], 0)
    for start, end in calls:
        made.tool_calls.append(ToolCall(1, "python", {}, "success", "", end - start, began_at=start))
    made.tool_calls.append(ToolCall(1, "", {}, "parse_error", "", 0.0))
    return made


def bars(run: Path) -> dict[str, list[tuple[str, float, float]]]:
    chart = step_timeline(run)
    assert chart is not None and chart.title == "Time line of step 4"
    found: dict[str, list[tuple[str, float, float]]] = {}
    for row in chart.spec["data"]["values"]:
        assert row["y"] == pytest.approx(row["end"] - row["x"])
        found.setdefault(row["row"], []).append((row["series"], round(row["x"], 3), round(row["end"], 3)))
    return found


def test_ranks_and_engines_are_drawn_on_one_clock(tmp_path: Path) -> None:
    phases = [("time/rollout", 5.0, 7.0), ("time/reward", 7.0, 7.5), ("time/token_diagnostics", 9.0, 9.5)]
    write(tmp_path, RANK.format(0), [("step_000004", 5.0, 10.0), *phases, ("gloo:send", 8.0, 8.1)])
    write(tmp_path, RANK.format(10), [("step_000004", 0.0, 5.0), ("time/update", 2.6, 4.0)], base=1005.0)
    write(tmp_path, RANK.format(2), [("step_000004", 5.1, 9.9), ("time/update", 7.6, 9.0)])
    steps = [("execute_context_2(9)_generation_0(0)", 4.0, 6.0), ("execute_context_0(0)_generation_2(2)", 6.001, 7.0)]
    write(tmp_path, ENGINE.format(1), [*steps, ("execute_context_0(0)_generation_1(1)", 8.0, 8.5)])
    assert list(bars(tmp_path).items()) == [
        ("rank 0", [("rollout", 0.0, 2.0), ("reward", 2.0, 2.5), ("other", 4.0, 4.5)]),
        ("rank 2", [("update", 2.6, 4.0)]),
        ("rank 10", [("update", 2.6, 4.0)]),
        ("engine 1", [("engine samples", 0.0, 2.0), ("engine samples", 3.0, 3.5)]),
    ]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_tools_and_scorers_have_rows_of_what_dumps_record(tmp_path: Path, form: Form) -> None:
    """Also for trajectories that a later step trains; a dump without any in the step is the last that is read."""
    write(tmp_path, RANK.format(0), [("step_000004", 5.0, 10.0), ("time/update", 8.0, 9.0)])
    write(tmp_path, ENGINE.format(0), [("execute_context_0(0)_generation_1(1)", 8.0, 8.5)])
    dumps = {
        3: [trajectory((1006.0, 1007.0))],
        4: [
            trajectory((1004.0, 1006.0), (1005.5, 1006.5), scored=(1006.5, 1007.0)),
            trajectory((1005.9, 1006.8), scored=(1006.9, 1007.5)),
            trajectory(),
        ],
        5: [trajectory((1009.0, 1010.5), scored=(1011.0, 1012.0))],
        6: [trajectory((1011.0, 1012.0))],
        7: [trajectory((1007.5, 1008.0))],
    }
    prompt = Prompt("p", "d", (), "1", (1,))
    for step, trajectories in dumps.items():
        write_trajectories(tmp_path, step, [Group(prompt, trajectories)], lambda ids: "", form=form)
    assert list(bars(tmp_path).items())[1:] == [
        ("engine 0", [("engine samples", 3.0, 3.5)]),
        ("tools", [("tool runs", 0.0, 1.8), ("tool runs", 4.0, 5.0)]),
        ("scoring", [("reward", 1.5, 2.5)]),
    ]


def test_a_damaged_dump_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, RANK.format(0), [("step_000004", 0.0, 2.0), ("time/publish", 0.0, 1.0)])
    later = Group(Prompt("p", "d", (), "1", (1,)), [trajectory((1000.5, 1001.0))])
    write_trajectories(tmp_path, 5, [later], lambda ids: "")
    RunPaths(tmp_path).dump(4, "parquet").write_bytes(b"no table")
    assert bars(tmp_path) == {"rank 0": [("publish", 0.0, 1.0)], "tools": [("tool runs", 0.5, 1.0)]}
    [record] = caplog.records
    assert "step_000004.parquet is damaged" in record.getMessage()


def test_the_latest_step_of_rank_zero_is_taken(tmp_path: Path) -> None:
    assert step_timeline(tmp_path) is None
    write(tmp_path, "step_000003_rank_0.json.gz", [("step_000003", 0.0, 1.0), ("time/update", 0.0, 1.0)])
    write(tmp_path, RANK.format(0), [("step_000004", 0.0, 2.0), ("time/publish", 0.0, 1.0)])
    write(tmp_path, "step_000005_rank_1.json.gz", [("step_000005", 0.0, 1.0)])
    assert bars(tmp_path) == {"rank 0": [("publish", 0.0, 1.0)]}


DAMAGED = {"no gzip": b"no gzip", "no JSON": gzip.compress(b"no JSON"), "no trace": gzip.compress(b"{}"), "empty": b""}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_trace_is_left_out_and_said(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, RANK.format(0), [("step_000004", 0.0, 2.0), ("time/publish", 0.0, 1.0)])
    (RunPaths(tmp_path).profile / RANK.format(1)).write_bytes(content)
    assert bars(tmp_path) == {"rank 0": [("publish", 0.0, 1.0)]}
    [record] = caplog.records
    assert "step_000004_rank_1.json.gz is left out of the time line: " in record.getMessage()


def test_a_trace_that_is_too_large_to_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, RANK.format(0), [("step_000004", 0.0, 2.0), ("time/publish", 0.0, 1.0)])
    write(tmp_path, RANK.format(1), [(f"time/{'x' * 4000}{place}", 0.0, 1.0) for place in range(200)])
    sizes: list[Any] = [path.stat().st_size for path in sorted(RunPaths(tmp_path).profile.iterdir())]
    monkeypatch.setattr(module, "LARGEST", sizes[0])
    assert sizes[1] > sizes[0] and bars(tmp_path) == {"rank 0": [("publish", 0.0, 1.0)]}
    monkeypatch.setattr(module, "LARGEST", sizes[0] - 1)
    assert step_timeline(tmp_path) is None
