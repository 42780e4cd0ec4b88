"""Engines and trainer on the same GPUs take turns: who leaves before who comes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from ctpo_megatron.config import Config, RolloutConfig
from ctpo_megatron.data import Batch
from ctpo_megatron.engines.cpu.priority import BEHIND_ENGINES
from ctpo_megatron.policy import Layout
from ctpo_megatron.rollouts import Evaluated
from ctpo_megatron.run import Bridge
from ctpo_megatron.run.services import Services

ONE_RANK = Layout(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, torch.device("cpu"))
CONFIG = Config.model_validate(
    {"run": {"name": "a", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["t.parquet"]}}
)


class Recorder:
    """Stands for engines, policy and evaluation, whose GPUs are not here, and writes down what they are asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.phases: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.batch: Batch | None = Batch([])
        self.before_work: Any = lambda: None

    transport = "file"

    def sleep(self, level: int) -> None:
        self.calls.append(f"engines sleep {level}")

    def wake(self) -> None:
        self.calls.append("engines wake")

    def release(self) -> None:
        self.calls.append("trainer leaves")

    def work(self, what: str) -> None:
        self.before_work()
        self.calls.append(what)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.before_work()
        yield "weight", torch.zeros(1)

    def begin_sync(self, named_tensors: Any, version: int) -> None:
        self.calls.append(f"engines take weights {version}: {[name for name, _ in named_tensors]}")

    def finish_update(self) -> None:
        self.calls.append("engines have them")

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        self.calls.append(f"nothing else is asked of them before {version}")
        yield
        self.calls.append(f"they sample with {version}")

    def next_batch(self, step: int) -> Batch | None:
        self.calls.append(f"sample {step}")
        return self.batch

    def run(self, step: int) -> Evaluated:
        self.calls.append(f"evaluate {step}")
        return Evaluated(step)

    def begin(self, step: int) -> None:
        self.calls.append(f"begin to evaluate {step}")

    def end(self) -> Evaluated:
        self.calls.append("evaluation ends")
        return Evaluated(0, {"val/acc": 0.5})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Sooner or later, an evaluation is on the line of its step."""
        assert step == 0
        self.logged.append(metrics)

    log_evaluation = log

    def phase(self, name: str) -> Any:
        self.phases.append(name)
        return nullcontext()

    def note(self, text: str) -> None:
        """Nothing is shown."""


def a_bridge(*, shared: bool, ahead: int = 0) -> tuple[Bridge, Recorder]:
    recorder = Recorder()
    parts: Any = recorder
    config = CONFIG.model_copy(update={"rollout": RolloutConfig(max_staleness=ahead)})
    bridge = Bridge(ONE_RANK, Services(parts, parts, parts), parts, config, shared=shared)
    recorder.before_work = bridge.give_way
    return bridge, recorder


def a_run(bridge: Bridge, recorder: Any) -> list[str]:
    """In a thread, which gives way to engines for good."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(a_run_in_this_thread, bridge, recorder).result()


def a_run_in_this_thread(bridge: Bridge, recorder: Any) -> list[str]:
    """As `train.py` calls it: start, SFT, publish, evaluation, checkpoint, one step, export."""
    recorder.work("build the model and SFT")
    bridge.publish(recorder, 0)
    bridge.evaluate(0, recorder, awaited=False)
    recorder.work("save")
    recorder.release()
    assert bridge.next_batch(1, recorder) is not None
    recorder.work("update")
    bridge.end_evaluation()
    bridge.publish(recorder, 1)
    recorder.batch = None
    assert bridge.next_batch(2, recorder) is None
    bridge.settle()
    recorder.work("save, to end")
    return recorder.calls


def test_no_gpu_holds_both_sides() -> None:
    assert a_run(*a_bridge(shared=True)) == [
        "engines sleep 2",
        "build the model and SFT",
        "engines take weights 0: ['weight']",
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
        "engines take weights 1: ['weight']",
        "trainer leaves",
        "engines wake",
        "trainer leaves",
        "sample 2",
        "engines have them",
        "engines sleep 1",
        "save, to end",
    ]


def test_engines_with_gpus_of_their_own_never_sleep() -> None:
    calls = a_run(*a_bridge(shared=False))
    assert [call for call in calls if "sleep" in call or "wake" in call] == []
    assert calls.count("trainer leaves") == 3


def test_sampling_ahead_stops_for_an_update_alone() -> None:
    bridge, recorder = a_bridge(shared=False, ahead=1)
    calls = a_run(bridge, recorder)
    update = ["nothing else is asked of them before 1", "engines take weights 1: ['weight']", "they sample with 1"]
    start = calls.index(update[0])
    assert calls[start : start + 3] == update and recorder.phases.count("wait_rollout") == 2
    order = ["begin to evaluate 0", "save", "sample 1", "update", "evaluation ends", update[0]]
    assert [call for call in calls[: start + 1] if call in order] == order and recorder.logged == [{"val/acc": 0.5}]
    bridge, recorder = a_bridge(shared=False)
    assert not any("nothing else" in call for call in a_run(bridge, recorder))
    assert "wait_rollout" not in recorder.phases and recorder.logged == [{}]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_trainer_alone_gives_way_to_engines_that_sample_ahead(ahead: int) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def train() -> int:
        a_run_in_this_thread(*a_bridge(shared=False, ahead=ahead))
        return niceness()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train).result() == (max(niceness(), BEHIND_ENGINES) if ahead else niceness())


def test_an_evaluation_that_something_needs_is_waited_for_when_sampling_ahead() -> None:
    bridge, recorder = a_bridge(shared=False, ahead=1)
    policy: Any = recorder
    bridge.evaluate(0, policy, awaited=True)
    bridge.settle()
    assert recorder.calls == ["evaluate 0", "engines have them"] and recorder.logged == [{}]


@pytest.mark.parametrize("shared", [True, False])
def test_who_sleeps_already_is_left_alone(shared: bool) -> None:
    bridge, recorder = a_bridge(shared=shared)
    for _ in range(2):
        bridge.give_way()
    assert recorder.calls == ["engines sleep 2"] * shared


def test_a_transport_that_fails_to_begin_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        closed = False

        def init(self) -> None:
            raise OSError("the port is taken")

        def close(self) -> None:
            self.closed = True

    transport = Failing()
    monkeypatch.setattr("ctpo_megatron.run.bridge.make_transport", lambda *_: transport)
    bridge, recorder = a_bridge(shared=False)
    policy: Any = recorder
    with pytest.raises(OSError, match="the port is taken"), bridge:
        bridge.publish(policy, 1)
    assert transport.closed
