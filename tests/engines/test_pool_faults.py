"""What a pool does about engines that fail while a transport leads their update, or while they sleep: without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.base.stop import BEGUN, TRY_AGAIN
from ctpo_megatron.cli.errors import report_error
from ctpo_megatron.engines import EngineError
from ctpo_megatron.engines.weights import checksums
from tests.support.deadlines import scaled
from tests.weights.fleet import Fleet

CALL = "finish_weight_update"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, "tcp", scaled(20.0))
    yield made
    made.close()


class Leading:
    """A trainer that leads its updates, as over NCCL. failing: numbers of the engines that die, by attempt."""

    def __init__(self, fleet: Fleet, *failing: set[int]) -> None:
        self.fleet, self.failing, self.attempts = fleet, list(failing), 0

    def announce(self, version: int) -> None:
        """The engines are led."""

    def send(self, version: int) -> checksums.Sums:
        self.attempts += 1
        for index in self.failing.pop(0) if self.failing else ():
            self.fleet.engines[index].process.dead.set()
        self.fleet.pool.lead(CALL, lambda _: [version])
        return {}


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
    fleet: Fleet, failing: list[set[int]], attempts: int, live: list[bool], restarts: int
) -> None:
    trainer = Leading(fleet, *failing)
    fleet.pool.send(trainer, 3)
    assert (trainer.attempts, fleet.live) == (attempts, live)
    stats = fleet.pool.stats()
    assert (stats.get("engine_restarts", 0), stats["sync_by_tcp"]) == (restarts, attempts)
    assert fleet.pool.failure is None  # which would end the run
    fleet.pool.send(Leading(fleet), 4)
    assert [engine.version for engine in fleet.engines] == [4, 4]


def test_a_run_whose_engines_never_get_weights_may_be_tried_again(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match="weights 3 reached no engine in 2 attempts; see their logs") as failed:
        fleet.pool.send(Leading(fleet, {0, 1}, {0, 1}), 3)
    failed.value.add_note(f"{BEGUN} 2")
    assert report_error(failed.value, "train") == TRY_AGAIN
    assert capsys.readouterr().err.splitlines()[0] == f"ctpo: {failed.value}"


def test_an_engine_that_dies_asleep_is_begun_when_the_trainer_has_left_the_gpus(fleet: Fleet) -> None:
    pool, first = fleet.pool, fleet.engines[0].process
    pool.send(Leading(fleet), 1)
    fleet.engines[1].process.dead.set()
    pool.sleep(2)
    pool.sleep(2)  # sleeps already
    assert [engine.up for engine in fleet.engines] == [True, False]
    pool.send(Leading(fleet), 2)
    assert pool.is_asleep and [engine.up for engine in fleet.engines] == [True, False]
    pool.wake()
    assert [call for call in first.calls if call != CALL] == ["sleep 2", "wake weights", "wake kv_cache"]
    assert not pool.is_asleep
    pool.send(Leading(fleet), 3)
    assert [engine.version for engine in fleet.engines] == [3, 3]
