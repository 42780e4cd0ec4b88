"""Where a run stands: the numbers of its steps, what is due after each, and how the stop signal ends it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctpo_megatron.base.stop import BEGUN, ENDING, Cancelled, StopSignal
from ctpo_megatron.config import Config
from ctpo_megatron.data import Batch, Group, Prompt, Trajectory
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.policy import TrainResult
from ctpo_megatron.rollouts import Evaluated
from ctpo_megatron.run import Run, Services, TooManyFailed
from ctpo_megatron.tracking import Progress
from ctpo_megatron.train import reinforce
from tests.tracking.synthetic_run import make_config


class Recorder:
    """Stands for trainer, rollouts, evaluation, checkpoints and reporter, and writes down what they are asked.

    fails: a call that finds the run to be stopped.
    """

    def __init__(self, stop: StopSignal, fails: str = "") -> None:
        self.calls: list[str] = []
        self.progress, self.version, self.write_s, self.latest = Progress(), 1, 0.0, {"step": 0}
        self.restored: int | None = None
        self._stop, self._fails = stop, fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self._called(name, *arguments, *keywords.values())

        return call

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append(" ".join([name, *map(str, arguments)]))
        if name == self._fails:
            os.kill(os.getpid(), signal.SIGTERM)
            raise Cancelled("stop requested")

    def phase(self, name: str) -> Any:
        return nullcontext()

    def note(self, text: str) -> None:
        """Nothing is shown."""

    def release(self) -> None:
        """On GPUs of its own."""

    def stop_agreed(self) -> bool:
        return self._stop.is_set()

    def restore(self, checkpoint: Any) -> int | None:
        return self.restored

    def publish(self, trainer: Any, version: int) -> bool:
        self._called("publish", version)
        return True

    def run(self, step: int) -> Evaluated:
        self._called("evaluate", step)
        return Evaluated(step)

    def end(self) -> None:
        """No evaluation is under way."""

    def lacks(self, latest: Any) -> bool:
        return False

    def next_batch(self, step: int) -> Batch | None:
        self.calls.append(f"sample {step}")
        return None if self._stop.is_set() else Batch([])

    def train(self, batch: Batch) -> TrainResult:
        self.calls.append(f"train {self.version}")
        self.version += 1
        return TrainResult({}, {})

    def log_step(self, step: int, *_: Any) -> None:
        self.calls.append(f"log {step}")

    def log(self, step: int, metrics: Any) -> None:
        """A line for the state before the first step."""

    def complete(self, done: int, *, wait: bool) -> None:
        """No save is under way."""


class Engines:
    """Stands for the pool. recorder: has `finish_update` written down."""

    settings = SimpleNamespace(weights=SimpleNamespace(transport="auto"))

    def __init__(self, recorder: Recorder) -> None:
        self.finish_update = recorder.finish_update

    def wait_ready(self) -> EngineFacts:
        return EngineFacts(torch.float32, "127.0.0.1", "tcp")


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGALRM)}
    signal_of_run = StopSignal(grace_s=60)
    with signal_of_run.deferred():
        yield signal_of_run
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def a_run(tmp_path: Path, stop: StopSignal, fails: str = "", **sections: Any) -> tuple[Run, Any]:
    settings: dict[str, Any] = {
        "run": {"name": "demo", "root": str(tmp_path), "steps": 5},
        "eval": {"every": 2},
        "checkpoint": {"every": 3},
    }
    recorder: Any = Recorder(stop, fails)
    config = make_config(tmp_path, **(settings | sections))
    return of_recorder(config, recorder, stop), recorder


def of_recorder(config: Config, recorder: Any, stop: StopSignal, **clock: Any) -> Run:
    recorder.connect = lambda facts, pool: None
    engines: Any = Engines(recorder)
    return Run(config, recorder, Services(recorder, recorder, engines), recorder, recorder, stop, **clock)


def test_the_loop_is_algorithm_1(tmp_path: Path, stop: StopSignal) -> None:
    run, recorder = a_run(tmp_path, stop)
    reinforce(run, recorder)
    assert run.end() and run.done == 5
    assert recorder.calls == [
        *("publish 1", "evaluate 0", "save 0"),
        *("sample 1", "train 1", "publish 2", "log 1"),
        *("sample 2", "train 2", "publish 3", "log 2", "evaluate 2"),
        *("sample 3", "train 3", "publish 4", "log 3", "save 3"),
        *("sample 4", "train 4", "publish 5", "log 4", "evaluate 4"),
        *("sample 5", "train 5", "publish 6", "log 5", "evaluate 5", "save 5"),
        "finish_update",
    ]


def test_a_resumed_run_does_the_steps_that_are_left(tmp_path: Path, stop: StopSignal) -> None:
    run, recorder = a_run(tmp_path, stop)
    recorder.restored, recorder.version = 3, 4
    run.restore(None)
    reinforce(run, recorder)
    assert [call for call in recorder.calls if call.startswith(("publish", "sample", "save"))] == [
        *("publish 4", "sample 4", "publish 5", "sample 5", "publish 6", "save 5")
    ]


def saves(tmp_path: Path, stop: StopSignal, every: int | str, steps: int, step_s: float, write_s: float) -> list[int]:
    """The steps after which a run saves whose steps, and checkpoints, take so many seconds."""
    now = 0.0
    settings: Any = {"run": {"name": "demo", "root": str(tmp_path), "steps": steps}, "checkpoint": {"every": every}}
    _, recorder = a_run(tmp_path, stop, **settings)

    def train(batch: Batch) -> TrainResult:
        nonlocal now
        now += step_s
        return Recorder.train(recorder, batch)

    def save(done: int) -> None:
        nonlocal now
        now += write_s
        recorder.write_s = write_s
        recorder.calls.append(f"save {done}")

    recorder.train, recorder.save = train, save
    config = make_config(tmp_path, **settings)
    run = of_recorder(config, recorder, stop, clock=lambda: now)
    reinforce(run, recorder)
    assert run.end()
    return [int(call.removeprefix("save ")) for call in recorder.calls if call.startswith("save ")]


@pytest.mark.parametrize(
    ("every", "steps", "step_s", "write_s", "expected"),
    [
        ("auto", 5, 60, 1, [5]),  # a short run has the last step alone
        ("auto", 40, 60, 1, [15, 30, 40]),
        ("auto", 40, 60, 45, [15, 30, 40]),  # 5 % of 15 minutes
        ("auto", 60, 60, 90, [15, 44, 60]),  # 90 s are 5 % of 30 minutes, and within them
        ("auto", 3, 2000, 1, [1, 2, 3]),
        (0, 5, 2000, 1, [5]),
        (2, 5, 1, 1, [0, 2, 4, 5]),
        (3, 5, 1, 1, [0, 3, 5]),
        (5, 5, 1, 1, [0, 5]),
        (7, 5, 1, 1, [0, 5]),
        ("auto", 0, 1, 1, []),
        (0, 0, 1, 1, []),
    ],
)
def test_when_a_checkpoint_is_due(
    tmp_path: Path, stop: StopSignal, every: int | str, steps: int, step_s: float, write_s: float, expected: list[int]
) -> None:
    assert saves(tmp_path, stop, every, steps, step_s, write_s) == expected


@pytest.mark.parametrize(
    ("fails", "last"),
    [("sample", ["sample 2"]), ("train", ["sample 2", "train 2", "log 2"]), ("log", ["publish 3", "log 2"])],
)
def test_sigterm_ends_the_loop_in_its_step(tmp_path: Path, stop: StopSignal, fails: str, last: list[str]) -> None:
    """Nothing is published, evaluated or sampled after it; the steps done are saved."""
    run, recorder = a_run(tmp_path, stop)
    original = {"sample": "next_batch", "train": "train", "log": "log_step"}[fails]
    function = getattr(recorder, original)

    def signalled(first: Any, *rest: Any) -> Any:
        if run.done == (2 if fails == "log" else 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return function(first, *rest)

    setattr(recorder, original, signalled)
    reinforce(run, recorder)
    assert not run.end() and run.done == (1 if fails == "sample" else 2)
    assert recorder.calls[-len(last) - 1 :] == [*last, f"ensure_saved {run.done}"]


def test_a_stop_before_the_first_evaluation_is_reported_by_it(tmp_path: Path, stop: StopSignal) -> None:
    run, recorder = a_run(tmp_path, stop)
    os.kill(os.getpid(), signal.SIGTERM)
    reinforce(run, recorder)
    assert not run.end()
    assert recorder.calls == ["publish 1", "evaluate 0", "save 0", "ensure_saved 0"]


def test_a_stop_while_the_last_update_is_awaited_saves_too(tmp_path: Path, stop: StopSignal) -> None:
    run, recorder = a_run(tmp_path, stop, fails="finish_update")
    reinforce(run, recorder)
    assert not run.end() and recorder.calls[-2:] == ["finish_update", "ensure_saved 5"]


def test_a_failure_of_a_run_that_has_trained_says_after_which_step(tmp_path: Path, stop: StopSignal) -> None:
    """Such a run can be continued by another start, where the cause passes."""
    run, recorder = a_run(tmp_path, stop)
    function, error = recorder.next_batch, OSError(errno.EIO, "Input/output error")

    def failing(step: int) -> Any:
        if run.done == 2:
            raise error
        return function(step)

    recorder.next_batch = failing
    with pytest.raises(OSError, match="Input/output") as raised, run.progress_noted():
        reinforce(run, recorder)
    assert raised.value is error and error.__notes__ == [f"{BEGUN} 2"]


def test_the_first_evaluation_can_be_left_out_but_not_that_of_a_run_without_steps(
    tmp_path: Path, stop: StopSignal
) -> None:
    quiet = {"every": 2, "before_training": False}
    assert a_run(tmp_path, stop)[0].evaluates
    assert not a_run(tmp_path, stop, eval=quiet)[0].evaluates
    no_steps = {"name": "demo", "root": str(tmp_path), "steps": 0}
    assert a_run(tmp_path, stop, eval=quiet, run=no_steps)[0].evaluates


def test_an_evaluation_is_awaited_where_something_needs_its_result(tmp_path: Path, stop: StopSignal) -> None:
    def awaited(**checkpoint: object) -> list[int]:
        run, _ = a_run(tmp_path, stop, checkpoint={"every": 3, **checkpoint})
        steps = []
        for run.done in range(6):
            steps += [run.done] if run.awaits_evaluation else []
        return steps

    assert awaited(keep_best=0, best_metric="val/x/acc/mean@1") == [5]  # the last checkpoint, the report, the export
    assert awaited(keep_best=2, best_metric="reward/mean") == [5]
    assert awaited(keep_best=2, best_metric="val/x/acc/mean@1") == [0, 3, 5]


def verdicts(missing: int, of: int = 4) -> Batch:
    """A batch of which so many samples have no verdict."""
    why = NoVerdict("exception", "the scorer failed (OSError('judge 7 is away'))")
    samples = [Trajectory("p", n, 0, reward=None if n < missing else 1.0) for n in range(of)]
    for each in samples[:missing]:
        each.no_verdict = why
    return Batch([Group(Prompt("p", "test", (), "", ()), samples, dropped=True)])


@pytest.mark.parametrize(
    ("missing", "limit", "ends"),
    [
        ([3, 4, 4, 4, 4], 0.5, 3),
        ([0, 0, 4, 4, 0], 0.5, 4),
        ([3, 1, 2, 3, 1], 0.5, None),  # exactly the limit is allowed
        ([3, 4, 0, 1, 1], 0.5, 3),
        ([4, 4, 4, 4, 4], 1.0, None),
        ([0, 0, 0, 0, 1], 0.0, 5),
        ([0, 0, 0, 0, 0], 0.0, None),
    ],
)
def test_too_few_verdicts_end_the_run_with_its_state_saved(
    tmp_path: Path, stop: StopSignal, missing: list[int], limit: float, ends: int | None
) -> None:
    run, recorder = a_run(tmp_path, stop, reward={"max_failed": limit})
    recorder.next_batch = lambda step: verdicts(missing[step - 1])
    if ends is None:
        reinforce(run, recorder)
        assert run.end() and run.done == 5
        return
    with pytest.raises(TooManyFailed) as raised:
        reinforce(run, recorder)
    said = str(raised.value)
    assert f"steps {ends - 2} to {ends} have no verdict, more than reward.max_failed = {limit:g} allows, most" in said
    assert "most of them as the scorer failed (OSError('judge 7 is away'))" in said
    assert "or raise reward.max_failed" in said and "run.resume=auto" in said
    assert recorder.calls[-2:] == [f"log {ends}", f"ensure_saved {ends}"] and run.done == ends


@pytest.mark.parametrize("limit", [0.0, 0.5, 0.99])
def test_a_first_batch_without_any_verdict_ends_the_run_with_the_most_frequent_cause(
    tmp_path: Path, stop: StopSignal, limit: float
) -> None:
    run, recorder = a_run(tmp_path, stop, reward={"max_failed": limit})
    batch = verdicts(4)
    batch.groups[0].trajectories[0].no_verdict = NoVerdict("timeout", "the scorer was killed after 5 s")
    recorder.next_batch = lambda step: batch
    with pytest.raises(TooManyFailed) as raised:
        reinforce(run, recorder)
    said = str(raised.value)
    assert "100% of the samples of steps 1 to 1 have no verdict" in said
    assert "most of them as the scorer failed (OSError('judge 7 is away'))" in said and "--dry-run" in said
    assert recorder.calls[-2:] == ["log 1", "ensure_saved 1"] and run.done == 1


def test_a_resumed_run_counts_anew(tmp_path: Path, stop: StopSignal) -> None:
    """The judge may be back: two bad batches before the resume do not end the run after it."""
    run, recorder = a_run(tmp_path, stop)
    recorder.restored, recorder.version = 3, 4
    recorder.next_batch = lambda step: verdicts(4)
    run.restore(None)
    reinforce(run, recorder)
    assert run.end() and run.done == 5
