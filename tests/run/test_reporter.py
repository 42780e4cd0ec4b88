"""The reporter on its own: rank zero writes metrics, dumps and time; the other ranks only time."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.data import Batch, Group, Prompt, Trajectory
from ctpo_megatron.objective import PositionStats
from ctpo_megatron.policy import StepPositions, TrainResult
from ctpo_megatron.report.page import checks
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.run import Reporter
from ctpo_megatron.tracking import Heartbeat, read_heartbeat, read_positions, read_trajectories
from tests.tracking.synthetic_run import make_config


def batch(reward: float = 1.0) -> Batch:
    prompt = Prompt("p0", "test", (), "4", (1, 2))
    trajectory = Trajectory("p0", 0, seed=0, reward=reward, finish_reason="answer")
    trajectory.append_context([1, 2], turn=0)
    trajectory.append_model([3, 4], [-0.5, -0.5], [1, 1], turn=1)
    return Batch([Group(prompt, [trajectory])], {"reward/mean": reward, "tokens/total": 4.0})


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat is written soon."""
    monkeypatch.setattr("ctpo_megatron.run.reporter._HEARTBEAT_S", 0.01)


@pytest.fixture
def report(tmp_path: Path) -> Iterator[Reporter]:
    config = make_config(tmp_path, tracking={"live": "off", "trackers": []})
    with Reporter(config, tmp_path, lambda ids: " ".join(map(str, ids)), trainers=1, peak=None) as reporter:
        yield reporter


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_has_its_metrics_time_and_trajectories(report: Reporter, tmp_path: Path) -> None:
    with report.phase("step"):
        pass
    report.log_step(1, batch(), TrainResult({"actor/pg_loss": 0.25}, {0: {"advantage": 1.5}}))
    report.log(1, {"val/test/acc/mean@1": 0.5})
    (line,) = lines(tmp_path)
    assert line["reward/mean"] == 1.0 and line["actor/pg_loss"] == 0.25 and line["val/test/acc/mean@1"] == 0.5
    assert line["time/step"] >= 0 and line["tokens/per_second"] == line["tokens/total"] / line["time/step"]
    assert report.latest == line
    report.flush()
    (record,) = read_trajectories(tmp_path / "trajectories" / "step_000001.parquet")
    assert record["token_ids"] == [1, 2, 3, 4] and record["advantage"] == 1.5 and record["answer"] == "4"


def test_a_line_is_not_written_to_a_file_that_was_removed(report: Reporter, tmp_path: Path) -> None:
    report.log_step(1, batch(), TrainResult({}, {}))
    report.flush()
    (tmp_path / "metrics.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"was removed while the run was writing to it: '.*metrics\.jsonl'"):
        report.log_step(2, batch(), TrainResult({}, {}))


def test_the_time_of_a_step_reaches_from_line_to_line(report: Reporter, tmp_path: Path) -> None:
    with report.stage("rl"):
        report.log(0, {"val/test/acc/mean@1": 0.5})
        began, _ = report.phases._lap
        for step in (1, 2):
            with report.phase("step"), report.phase("update"):
                time.sleep(0.02)
            report.log_step(step, batch(), TrainResult({}, {}))
            with report.phase("eval"):
                time.sleep(0.03)
            report.log(step, {"val/test/acc/mean@1": 0.5})
            with report.phase("checkpoint"):
                report.flush()
            report.log(step, {})
        ended, _ = report.phases._lap  # not now: writing the last line, which a busy machine delays, is in no line
    first, *steps = lines(tmp_path)
    assert "time/step" not in first
    assert sum(line["time/step"] for line in steps) == pytest.approx(ended - began, abs=1e-6)
    for line in steps:
        assert line["time/update"] >= 0.02 and line["time/eval"] >= 0.03 and "time/dump" in line
        parts = [line[f"time/{name}"] for name in ("update", "eval", "checkpoint")]
        assert line["time/step"] >= sum(parts)
        assert line["tokens/per_second"] == line["tokens/total"] / line["time/step"]


def test_a_sample_is_of_the_last_prompts(tmp_path: Path) -> None:
    config = make_config(tmp_path, tracking={"live": "off", "trackers": [], "trajectories": "sample"})
    groups = [batch(number / 16).groups[0] for number in range(12)]
    diagnostics = {number: {"advantage": float(number)} for number in range(12)}
    with Reporter(config, tmp_path, str, trainers=1, peak=None) as reporter:
        reporter.log_step(1, Batch(groups), TrainResult({}, diagnostics))
    dumped = read_trajectories(tmp_path / "trajectories" / "step_000001.parquet")
    assert [(record["reward"], record["advantage"]) for record in dumped] == [(n / 16, n) for n in range(4, 12)]


def test_a_dump_that_fails_is_counted_and_the_run_goes_on(
    report: Reporter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "trajectories"
    blocked.write_text("a file where the folder should be")
    report.log_step(1, batch(), TrainResult({}, {}))
    report.flush()  # as at a checkpoint
    for step in (2, 3):
        report.log_step(step, batch(), TrainResult({}, {}))
        while report._dumps._pending and not report._dumps._pending[-1][1].done():
            time.sleep(0.01)
    blocked.unlink()
    report.log_step(4, batch(), TrainResult({}, {}))
    report.flush()
    (tmp_path / "config.yaml").write_text("run: {name: lossy}\n")
    assert [line.get("tracking/dump_failures") for line in lines(tmp_path)] == [1, None, 1, 1]
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 3
    assert re.match(r"the dump of step 1 in trajectories could not be written, and .*: .*File exists", said[0])
    assert [path.name for path in blocked.iterdir()] == ["step_000004.parquet"]
    (found,) = [check for check in checks(RunData.load(tmp_path)) if check.label == "Dumps lost"]
    assert (found.value, found.good) == ("3", False)


def test_an_evaluation_is_compared_with_the_first_of_the_run_also_after_a_resume(tmp_path: Path, capfd: Any) -> None:
    config = make_config(tmp_path, tracking={"live": "plain", "trackers": []})
    for step, accuracy in ((0, 0.25), (8, 0.75)):
        with Reporter(config, tmp_path, str, trainers=1, peak=None) as reporter:
            reporter.log(step, {"val/test/acc/mean@1": accuracy})
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[eval]")]
    assert printed == ["[eval] step 0 test mean@1 0.250", "[eval] step 8 test mean@1 0.750 (+0.50)"]


def test_dropped_groups_are_dumped_where_they_were_sampled(report: Reporter, tmp_path: Path) -> None:
    sampled = [batch(reward).groups[0] for reward in (0.0, 0.25, 0.5, 0.75)]
    sampled[0].dropped = sampled[2].dropped = True
    report.log_step(1, Batch(sampled), TrainResult({}, {1: {"advantage": 1.5}}))
    report.flush()
    dumped = read_trajectories(tmp_path / "trajectories" / "step_000001.parquet")
    assert [record["reward"] for record in dumped] == [0.0, 0.25, 0.5, 0.75]
    assert [record.get("dropped", False) for record in dumped] == [True, False, True, False]
    assert [record.get("advantage") for record in dumped] == [None, None, None, 1.5]


def test_the_first_batch_says_what_is_wrong_and_later_ones_do_not(
    report: Reporter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = {"reward/groups_mixed": 0.0, "reward/mean": 0.0, "reward/std": 0.0}
    for step in (3, 4):  # 3: where it was resumed
        report.log_step(step, batch(0.0), TrainResult(dead, {}))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(
        "warning: step 3: no group has both outcomes: all rewards are 0, so the gradient is"
    )
    assert record.message.endswith(f"in {tmp_path / 'trajectories' / 'step_000003.parquet'}")


def test_a_run_that_gets_worse_says_so_at_once(report: Reporter, caplog: pytest.LogCaptureFixture) -> None:
    """Also after a resume, which knows where the run began; and once."""
    spread = {"reward/std": 0.01}
    report.log_step(1, batch(0.75), TrainResult(spread, {}))
    report.log_step(2, batch(0.25), TrainResult(spread, {}))
    report.discard(1, None)
    caplog.clear()
    for step in (2, 3):
        report.log_step(step, batch(0.25), TrainResult(spread, {}))
    (record,) = [record for record in caplog.records if "fell" in record.message]
    assert record.levelname == "WARNING" and "step 2: sampled reward fell from 0.75 to 0.25" in record.message
    assert "policy.optimizer.lr" in record.message


def test_what_is_discarded_is_set_aside(report: Reporter, tmp_path: Path) -> None:
    nothing = PositionStats.empty()
    for step in (1, 2, 3):
        positions = StepPositions(nothing, nothing, nothing, nothing)
        report.log_step(step, batch(step / 4), TrainResult({}, {}, positions, dumped=step != 2))
    assert [record["step"] for record in read_positions(tmp_path)] == [1, 2, 3]
    assert [record["step"] for record in read_positions(tmp_path, "last")] == [1, 3]
    report.discard(1, None)
    assert [record["step"] for record in read_positions(tmp_path)] == [1]
    assert (tmp_path / "discarded_positions.jsonl").exists()
    assert [line["step"] for line in lines(tmp_path)] == [1]
    dumps = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert dumps == ["discarded_step_000002.parquet", "discarded_step_000003.parquet", "step_000001.parquet"]
    report.log_step(2, batch(), TrainResult({}, {}))
    assert [line["reward/mean"] for line in lines(tmp_path)] == [0.25, 1.0]


def test_supervised_steps_are_written_apart(report: Reporter, tmp_path: Path) -> None:
    metrics = {"supervised/loss": 2.0, "actor/grad_norm": 1.0, "actor/lr": 1e-3, "memory/trainer_peak_mib": 100.0}
    metrics |= {"tokens/trained": 10.0, "tokens/trained_forward_tflop": 0.5}
    for done, steps, loss in ((-1, (1, 2, 3), 2.0), (1, (2,), 1.0)):
        report.begin_sft(done)
        for step in steps:
            with report.phase("sft"):
                pass
            report.log_sft(step, 3, metrics | {"supervised/loss": loss})
    records = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [(record["step"], record["sft/loss"]) for record in records] == [(1, 2.0), (2, 1.0)]
    discarded = [json.loads(line)["step"] for line in (tmp_path / "discarded_sft.jsonl").read_text().splitlines()]
    assert discarded == [2, 3]
    assert not lines(tmp_path)


def test_the_heartbeat_says_where_a_run_is_and_how_it_ended(tmp_path: Path) -> None:
    config = make_config(tmp_path, tracking={"live": "off", "trackers": []})

    def run(error: type[BaseException] | None) -> tuple[Heartbeat, Heartbeat]:
        """Its heartbeat in an update, and the last one; error: what ends it."""
        with (
            pytest.raises(error) if error else nullcontext(),
            Reporter(config, tmp_path, str, trainers=2, peak=None) as reporter,
            reporter.stage("rl"),
            reporter.phase("update"),
        ):
            reporter.log(5, {"reward/mean": 0.5})
            while (living := read_heartbeat(tmp_path)) is None or living.step != 5:
                time.sleep(0.01)
            if error:
                raise error
        last = read_heartbeat(tmp_path)
        assert last is not None
        return living, last

    for error, state in ((None, "ended"), (ZeroDivisionError, "failed"), (SystemExit, "ended")):
        living, last = run(error)
        assert (living.state, living.phase, living.ranks) == ("running", "rl/update", 2)
        assert (living.pid, living.host) == (os.getpid(), socket.gethostname())
        assert living.progress <= living.time <= last.time <= time.time()
        assert (last.state, last.step, last.phase) == (state, 5, "")
        (tmp_path / "heartbeat.json").unlink()


@pytest.mark.parametrize(
    ("rollout", "told"), [({}, True), ({"max_turns": 2}, True), ({"max_turns": 1}, False), ({"tools": []}, False)]
)
def test_no_tool_was_called_is_said_only_where_one_could_have_been(
    tmp_path: Path, rollout: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, tracking={"live": "off", "trackers": []}, rollout=rollout)
    with Reporter(config, tmp_path, lambda ids: "", trainers=1, peak=None) as report:
        first = batch()
        first.metrics["sandbox/calls"] = 0.0
        report.log_step(1, first, TrainResult({}, {}))
    assert any("no tool was called" in record.message for record in caplog.records) is told
