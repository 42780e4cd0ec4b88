"""What a pool does about engines that fail while a transport leads their update, or while they sleep: without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.base.stop import BEGUN, TRY_AGAIN
from ctpo_megatron.cli.errors import report_error
from ctpo_megatron.engines import EngineDied, EngineError, EnginePool, UpdateReport
from ctpo_megatron.engines.weights import checksums
from tests.engines.pool_helpers import make_config

CALL, SUMS = "finish_weight_update", {"weight": (8, 1)}


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

    async def ask(self, what: str, limit_s: float, method: str, *arguments: Any, key: str = "") -> Any:
        if method in self.dies:
            self.dies.remove(method)
            raise EngineDied(f"{self.name} died")
        if method == CALL:
            return UpdateReport(str(arguments[0]), [SUMS])
        self.calls.append(" ".join(("wake", *arguments[0])) if method == "wake_up" else method)
        return None

    def take_idle(self) -> float:
        return 0.0


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
    """Leads its updates, as over NCCL. failing: numbers of the engines that fail, by attempt."""

    def __init__(self, pool: EnginePool, *failing: set[int]) -> None:
        self.pool, self.failing, self.attempts = pool, list(failing), 0

    def announce(self, version: int) -> None:
        """The engines are led."""

    def send(self, version: int) -> checksums.Sums:
        self.attempts += 1
        for index in self.failing.pop(0) if self.failing else ():
            self.pool.engines[index].dies.add(CALL)  # type: ignore[attr-defined]
        self.pool.lead(CALL, lambda _: version)
        return SUMS


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
    trainer = Trainer(pool, *failing)
    pool.send(trainer, 3)
    assert (trainer.attempts, [engine.live for engine in pool.engines]) == (attempts, live)
    stats = pool.stats()
    assert (stats["engine_restarts"], stats["sync_bytes"]) == (restarts, 8 * attempts)
    assert pool.failure is None  # which would end the run
    pool.send(Trainer(pool), 4)
    assert all(engine.live and engine.version == 4 for engine in pool.engines)


def test_a_run_whose_engines_never_get_weights_may_be_tried_again(
    pool: EnginePool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match="weights 3 reached no engine in 2 attempts; see their logs") as failed:
        pool.send(Trainer(pool, {0, 1}, {0, 1}), 3)
    failed.value.add_note(f"{BEGUN} 2")
    assert report_error(failed.value, "train") == TRY_AGAIN
    assert capsys.readouterr().err.splitlines()[0] == f"ctpo: {failed.value}"


def test_an_engine_that_dies_asleep_is_begun_when_the_trainer_has_left_the_gpus(pool: EnginePool) -> None:
    first, second = pool.engines
    second.dies = {"sleep"}  # type: ignore[attr-defined]
    pool.send(Trainer(pool), 1)
    pool.sleep(2)
    pool.sleep(2)  # sleeps already
    assert (first.live, second.live, second.launches) == (True, False, 1)
    pool.send(Trainer(pool), 2)
    assert pool.is_asleep and second.launches == 1
    pool.wake()
    assert first.calls == ["sleep", "wake weights", "wake kv_cache"]  # type: ignore[attr-defined]
    assert not pool.is_asleep
    pool.send(Trainer(pool), 3)
    assert (second.launches, second.live, second.version) == (2, True, 3)


def test_engines_that_all_die_asleep_end_the_run(pool: EnginePool) -> None:
    for engine in pool.engines:
        engine.dies = {"sleep"}  # type: ignore[attr-defined]
    pool.sleep(2)
    with pytest.raises(EngineError, match="cannot be replaced while the trainer has the GPUs"):
        pool.send(Trainer(pool), 1)
