"""What a pool does about engines that fail while a transport leads their update, or while they sleep: without Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.base.stop import BEGUN, TRY_AGAIN
from ctpo_megatron.cli.errors import report_error
from ctpo_megatron.engines import EngineError, EnginePool
from ctpo_megatron.engines.tasks import EngineDied, UpdateReport
from tests.engines.pool_helpers import make_config


class Engine:
    """A stand-in for the handle of an engine. dies: calls in which its process dies, the first of each."""

    log_path = "its.log"

    def __init__(self, index: int) -> None:
        self.index, self.name = index, f"rollout engine {index}"
        self.live = self.up = True
        self.version, self.launches = 0, 1
        self.calls: list[str] = []
        self.dies: set[str] = set()

    async def start(self) -> None:
        self.launches += 1
        self.up, self.version = True, 0

    def kill(self, *, gently: bool = False) -> None:
        self.live = self.up = False

    async def sleep(self, level: int, limit_s: float) -> None:
        self._called("sleep")

    async def wake(self, tags: list[str], limit_s: float) -> None:
        self._called(f"wake {' '.join(tags)}")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.dies:
            self.dies.remove(name)
            raise EngineDied(f"{self.name} died")


async def nothing() -> None:
    return None


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[EnginePool]:
    with EventLoop() as loop:
        fleet = EnginePool(make_config(tmp_path, tmp_path), "unused", loop)
        fleet._start = loop.begin(nothing())
        fleet.engines = [Engine(0), Engine(1)]  # type: ignore[list-item]
        fleet.engines[0].facts = "facts"  # type: ignore[assignment]
        yield fleet


class Trainer:
    """Leads its updates itself, as over NCCL. failing: names of the engines that fail, by attempt."""

    def __init__(self, *failing: set[int]) -> None:
        self.failing, self.attempts = list(failing), 0

    def offer(self, version: int) -> Any:
        self.version = version
        return SimpleNamespace(
            version=version, names=frozenset(), size=8, began=time.monotonic(), kept=False, sums={},
            begin=self.begin, end=lambda: None, close=lambda: None,
        )  # fmt: skip

    def begin(self, update: Any) -> None:
        self.update = update

    def transfer(self) -> None:
        self.attempts += 1
        failing = self.failing.pop(0) if self.failing else set()
        for engine in self.update.engines:
            if engine.index in failing:
                self.update.fail(engine, "gone")
            else:
                self.update.take(engine, UpdateReport(str(self.version), []))


@pytest.mark.parametrize(
    ("failing", "attempts", "live", "restarts"),
    [
        ([], 1, [True, True], 0),
        ([{1}], 1, [True, False], 1),  # it gets its weights in the next update
        ([{0, 1}], 2, [True, True], 2),
        ([{0, 1}, {0}], 2, [False, True], 3),
    ],
)
def test_weights_that_reached_no_engine_are_sent_once_more(
    pool: EnginePool, failing: list[set[int]], attempts: int, live: list[bool], restarts: int
) -> None:
    trainer = Trainer(*failing)
    pool.send(trainer, 3)
    assert (trainer.attempts, [engine.live for engine in pool.engines]) == (attempts, live)
    stats = pool.stats()
    assert (stats["engine_restarts"], stats["sync_bytes"]) == (restarts, 8 * attempts)
    assert pool.failure is None  # which would end the run
    pool.send(Trainer(), 4)
    assert all(engine.live and engine.version == 4 for engine in pool.engines)


def test_a_run_whose_engines_never_get_weights_may_be_tried_again(
    pool: EnginePool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match="weights 3 reached no engine in 2 attempts; see their logs") as failed:
        pool.send(Trainer({0, 1}, {0, 1}), 3)
    failed.value.add_note(f"{BEGUN} 2")
    assert report_error(failed.value, "train") == TRY_AGAIN
    assert capsys.readouterr().err.splitlines()[0] == f"ctpo: {failed.value}"


def test_an_engine_that_dies_asleep_is_begun_when_the_trainer_has_left_the_gpus(pool: EnginePool) -> None:
    first, second = pool.engines
    second.dies = {"sleep"}  # type: ignore[attr-defined]
    pool.send(Trainer(), 1)
    pool.sleep(2)
    pool.sleep(2)  # sleeps already
    assert (first.live, second.live, second.launches) == (True, False, 1)
    pool.send(Trainer(), 2)
    assert pool.is_asleep and second.launches == 1
    pool.wake()
    assert first.calls == ["sleep", "wake weights", "wake kv_cache"]  # type: ignore[attr-defined]
    assert not pool.is_asleep
    pool.send(Trainer(), 3)
    assert (second.launches, second.live, second.version) == (2, True, 3)


def test_engines_that_all_die_asleep_end_the_run(pool: EnginePool) -> None:
    for engine in pool.engines:
        engine.dies = {"sleep"}  # type: ignore[attr-defined]
    pool.sleep(2)
    with pytest.raises(EngineError, match="cannot be replaced while the trainer has the GPUs"):
        pool.send(Trainer(), 1)


def test_an_update_without_some_of_the_models_tensors_is_refused(pool: EnginePool, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"up_proj": torch.ones(1), "lm_head.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"weights 1 lack 1 tensors, e\.g\. \['up_proj'\]"):
        pool.send(Trainer(), 1)
