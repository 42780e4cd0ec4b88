"""Engines and trainer on the same GPUs take turns: who leaves before who comes."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctpo_megatron.base.stop import Cancelled, NeverStop
from ctpo_megatron.config import Config, RolloutConfig
from ctpo_megatron.data import Batch
from ctpo_megatron.engines.cpu.setup import BEHIND_ENGINES
from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.rollouts import Evaluated
from ctpo_megatron.run import Run, Services
from tests.run.test_run import Recorder

CONFIG = Config.model_validate(
    {
        "run": {"name": "a", "steps": 9},
        "model": {"path": "m"},
        "data": {"train": ["t.parquet"]},
        "eval": {"every": 9},
        "checkpoint": {"every": 9},
    }
)


class Sharing(Recorder):
    """Stands for engines as well, whose GPUs are not here, and writes down who takes and leaves them."""

    def __init__(self) -> None:
        super().__init__(NeverStop())  # type: ignore[arg-type]
        self.phases: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.batch: Batch | None = Batch([])
        self.is_asleep = self.evaluates = self.stops = False
        self.version, self.latest, self.shared = 0, {"step": -1}, None
        self.settings = SimpleNamespace(weights=SimpleNamespace(transport="auto"))

    def wait_ready(self) -> EngineFacts:
        if self.stops:
            raise Cancelled("stop requested")
        return EngineFacts(torch.float32, "127.0.0.1", "tcp")

    def connect(self, facts: EngineFacts, pool: Any) -> None:
        assert pool is self
        self.calls.append("connect")

    def share_gpus(self, pool: Any) -> None:
        self.shared = pool

    def sleep(self, level: int) -> None:
        if not self.is_asleep:
            self.calls.append(f"engines sleep {level}")
        self.is_asleep = self.shared is not None or level == 2

    def wake(self) -> None:
        self.calls.append("engines wake")
        self.is_asleep = False

    def release(self) -> None:
        self.calls.append("trainer leaves")

    def work(self, what: str) -> None:
        """As `TrainerGroup` does."""
        if self.shared is not None:
            self.shared.sleep(level=1)
        self.calls.append(what)

    def publish(self, trainer: Any, version: int) -> bool:
        if self.stops:
            return False
        self.work(f"engines take weights {version}")
        return True

    def next_batch(self, step: int) -> Batch | None:
        self.calls.append(f"sample {step}")
        return self.batch

    def begin(self, step: int) -> None:
        self.calls.append(f"begin to evaluate {step}")
        self.evaluates = True

    def end(self) -> Evaluated | None:
        if not self.evaluates:
            return None
        self.evaluates = False
        self.calls.append("evaluation ends")
        return Evaluated(0, {"val/acc": 0.5})

    def save(self, done: int) -> None:
        """As `Checkpoints` does."""
        self.work("save")
        self.release()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Sooner or later, an evaluation is on the line of its step."""
        assert step == 0
        if metrics:
            self.logged.append(metrics)

    log_evaluation = log

    def phase(self, name: str) -> Any:
        self.phases.append(name)
        return super().phase(name)


def a_run(*, shared: bool, ahead: int = 0, **sections: Any) -> tuple[Run, Any]:
    recorder: Any = Sharing()
    sections["rollout"] = RolloutConfig(max_staleness=ahead)
    if shared:
        sections["placement"] = CONFIG.placement.model_copy(update={"mode": "colocated"})
    config = CONFIG.model_copy(update=sections)
    services = Services(recorder, recorder, recorder)
    return Run(config, recorder, services, recorder, recorder, NeverStop()), recorder  # type: ignore[arg-type]


def played(run: Run, recorder: Any) -> list[str]:
    """In a thread, which gives way to engines for good."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(played_in_this_thread, run, recorder).result()


def played_in_this_thread(run: Run, recorder: Any) -> list[str]:
    """As `train.py` calls it: start, SFT, publish, evaluation, checkpoint, one step, export."""
    recorder.work("build the model and SFT")
    run.publish()
    run.begin()
    assert run.next_batch(1) is not None
    recorder.work("update")
    recorder.version = 1
    run.publish()
    recorder.batch = None
    assert run.next_batch(2) is None
    assert run.end()
    recorder.work("export")
    return recorder.calls  # type: ignore[no-any-return]


def test_no_gpu_holds_both_sides() -> None:
    assert played(*a_run(shared=True)) == [
        "engines sleep 2",
        "build the model and SFT",
        "connect",
        "engines take weights 0",
        "trainer leaves",
        "engines wake",
        "trainer leaves",
        "evaluate 0",
        "engines sleep 1",  # the weights are needed again
        "save",
        "trainer leaves",
        "trainer leaves",
        "engines wake",
        "sample 1",
        "engines sleep 2",
        "update",
        "engines take weights 1",
        "trainer leaves",
        "engines wake",
        "trainer leaves",
        "sample 2",
        "finish_update",
        "engines sleep 1",
        "export",
    ]


def test_engines_with_gpus_of_their_own_never_sleep() -> None:
    calls = played(*a_run(shared=False))
    assert [call for call in calls if "sleep" in call or "wake" in call] == []
    assert calls.count("trainer leaves") == 3


def test_sampling_ahead_waits_for_an_evaluation_before_an_update() -> None:
    run, recorder = a_run(shared=False, ahead=1)
    calls = played(run, recorder)
    assert recorder.phases.count("wait_rollout") == 2
    order = ["begin to evaluate 0", "save", "sample 1", "update", "evaluation ends", "engines take weights 1"]
    assert [call for call in calls if call in order] == order and recorder.logged == [{"val/acc": 0.5}]
    run, recorder = a_run(shared=False)
    played(run, recorder)
    assert "wait_rollout" not in recorder.phases and recorder.logged == []


def test_the_log_names_the_transport(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    played(*a_run(shared=False))
    assert "weights go to the engines by tcp (rollout.weights.transport: auto)" in caplog.messages


def test_nothing_is_published_when_the_run_is_to_stop() -> None:
    for connected in (False, True):
        run, recorder = a_run(shared=False)
        if connected:
            run.publish()
        recorder.stops, before = True, list(recorder.calls)
        run.publish()
        assert recorder.calls == before  # the trainer keeps its memory, as it is going to save


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_trainer_alone_gives_way_to_engines_that_sample_ahead(ahead: int) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def train() -> int:
        played_in_this_thread(*a_run(shared=False, ahead=ahead))
        return niceness()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train).result() == (max(niceness(), BEHIND_ENGINES) if ahead else niceness())


def test_an_evaluation_that_something_needs_is_waited_for_when_sampling_ahead() -> None:
    run, recorder = a_run(shared=False, ahead=1, run=CONFIG.run.model_copy(update={"steps": 0}))
    run.begin()
    assert run.end()
    assert [call for call in recorder.calls if call.startswith(("e", "f"))] == ["evaluate 0", "finish_update"]


@pytest.mark.parametrize(("trainer", "told"), [("float32", []), ("bfloat16", ["float32", "bfloat16"])])
def test_engines_that_came_up_in_another_precision_are_named(
    trainer: str, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = a_run(shared=False, policy=CONFIG.policy.model_copy(update={"dtype": trainer}))
    run.publish()
    said = [record.message for record in caplog.records if "(policy.dtype)" in record.message]
    assert [all(name in text for name in [*told, "rollout.engine.dtype"]) for text in said] == [True] * bool(told)
