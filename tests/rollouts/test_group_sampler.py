"""Groups on scripted engines: what begins first and where, what is tried again, and what ends when engines do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.engines import GroupFailed, GroupTask, Sampling
from ctpo_megatron.rollouts import GroupSampler, TooManyQuarantined, group_sampler
from tests.rollouts.scripted import ScriptedEngine, ScriptedEngines

SAMPLING = Sampling(1.0, 1.0, 0)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sampler, "FIRST_PAUSE_S", 0.001)


def task(name: str, step: int = 1, samples: int = 4, length: int = 3) -> GroupTask:
    return GroupTask(Prompt(name, "test", (), "", (7,) * length), step, tuple(range(samples)), SAMPLING)


def settings(**rollout: Any) -> RolloutConfig:
    """An engine with places for two groups of four, and one more."""
    return RolloutConfig(**{"engine": {"max_num_seqs": 8, "max_model_len": 512}, "group_timeout_s": 20} | rollout)


async def begun(
    mine: GroupSampler, engines: ScriptedEngines, tasks: list[GroupTask], *, urgent: bool = False
) -> list[str]:
    """Names of all that have begun once these were added, of which nothing ends."""
    waiting = [asyncio.create_task(mine.sample(each, urgent=urgent)) for each in tasks]
    await asyncio.sleep(0.01)
    names = [each.prompt.id for each in engines.tasks]
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    return names


class Stuck(ScriptedEngines):
    """Nothing ends. One engine."""

    def __init__(self) -> None:
        super().__init__(stuck=[(step, place) for step in range(9) for place in range(99)])
        self.engines = self.engines[:1]


def test_groups_of_an_earlier_step_begin_first() -> None:
    """A retried or refilled one would hold the trainer up, behind a whole batch that it does not need yet."""
    engines = Stuck()
    tasks = [task(f"{step}{number}", step) for step in (2, 1) for number in range(2)]
    assert asyncio.run(begun(GroupSampler(engines, settings()), engines, tasks)) == ["10", "11", "20"]


def test_groups_that_are_expected_to_take_long_begin_first() -> None:
    """By their last answers; prompts that were not sampled yet by their own length. Others keep their order."""

    async def order() -> list[str]:
        mine = GroupSampler(engines, settings(engine={"max_num_seqs": 32, "max_model_len": 512}))
        for name, answer in (("short", 3), ("long", 90)):
            sampled = Trajectory(name, 0, 0)
            sampled.append_model([1] * answer, [0.0] * answer, [0] * answer, 1)
            mine._note(task(name).prompt, [sampled])
        lengths = {"a": 39, "short": 60, "b": 39, "new": 41, "c": 39, "long": 20}
        return await begun(mine, engines, [task(name, length=length) for name, length in lengths.items()])

    engines = Stuck()
    assert asyncio.run(order()) == ["long", "new", "a", "b", "c", "short"]


def test_groups_go_to_the_engine_with_the_least_to_do_and_never_beyond_its_places() -> None:
    class Watched(ScriptedEngines):
        async def sample(self, engine: ScriptedEngine, task: GroupTask) -> list[Trajectory]:
            load[engine.index] += 1
            most[engine.index] = max(most[engine.index], load[engine.index])
            try:
                return await super().sample(engine, task)
            finally:
                load[engine.index] -= 1

    load, most = [0, 0], [0, 0]

    async def all_of_them() -> None:
        mine = GroupSampler(Watched(), settings())
        groups = await asyncio.gather(*(mine.sample(task(f"p{number}")) for number in range(20)))
        assert len(groups) == 20 and mine.in_flight == 0

    asyncio.run(all_of_them())
    assert most == [3, 3]


def test_nothing_begins_on_hold_and_what_waits_begins_afterwards() -> None:
    async def held() -> None:
        mine = GroupSampler(engines, settings())
        mine.on_hold = True
        first = asyncio.create_task(mine.sample(task("p")))
        await asyncio.sleep(0.01)
        await mine.drain()
        assert not engines.tasks
        mine.resume()
        assert len(await first) == 4

    engines = ScriptedEngines()
    asyncio.run(held())


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_group_is_tried_again_as_often_as_is_allowed(failures: int) -> None:
    class Failing(ScriptedEngines):
        async def sample(self, engine: ScriptedEngine, task: GroupTask) -> list[Trajectory]:
            if len(self.tasks) < failures:
                self.tasks.append(task)
                raise GroupFailed("the tool's key is SECRET=abc\x1b[2J")
            return await super().sample(engine, task)

    engines = Failing()
    mine = GroupSampler(engines, settings(max_group_retries=2))
    if failures == 3:
        with pytest.raises(GroupFailed, match="failed 3 times, the last: the tool's key") as failed:
            asyncio.run(mine.sample(task("p")))
        assert "\x1b" not in str(failed.value)
    else:
        assert len(asyncio.run(mine.sample(task("p")))) == 4
    assert engines.counts["group_retries"] == min(failures, 2)
    assert all(each == task("p") for each in engines.tasks)


def test_an_engine_that_comes_back_gets_what_waits_for_it() -> None:
    engines = ScriptedEngines()
    engines.engines = [ScriptedEngine(0, live=False)]

    async def started() -> list[Trajectory]:
        waiting = asyncio.create_task(GroupSampler(engines, settings()).sample(task("p")))
        await asyncio.sleep(0.01)
        assert not engines.tasks
        engines.engines[0].live = True
        engines.notify()
        return await asyncio.wait_for(waiting, 5)

    assert len(asyncio.run(started())) == 4


def test_a_run_that_loses_too_many_prompts_ends_and_names_them() -> None:
    mine = GroupSampler(ScriptedEngines(), settings(max_quarantined=2))
    for name in ("a", "b", "b"):  # small data may hold a prompt twice
        mine.lose(task(name).prompt, 7, GroupFailed("refused"))
    assert [mine.is_quarantined(task(name).prompt) for name in "abc"] == [True, True, False]
    assert mine.engines.counts["quarantined"] == 2
    named = r"3 prompts were .* rollout.max_quarantined = 2; the last: .*'b' \(step 7\): refused; prompt 'c' \(step 8\)"
    with pytest.raises(TooManyQuarantined, match=named):
        mine.lose(task("c").prompt, 8, GroupFailed("refused"))
