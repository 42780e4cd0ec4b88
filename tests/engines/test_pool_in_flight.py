"""A real engine whose weights change, or that is asked for something else, while it plays groups."""

from __future__ import annotations

import asyncio
import copy
import time

import pytest
import ray

from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Group
from ctpo_megatron.engines import GroupTask, Sampling
from tests.engines.pool_helpers import Stage, largest_log_prob_error, tokens, versions
from tests.support.deadlines import scaled

pytestmark = pytest.mark.timeout(600)


def test_every_token_has_the_log_prob_of_the_version_that_it_is_stamped_with(stage: Stage) -> None:
    stage.sync(0.0)
    models, original = {stage.version: copy.deepcopy(stage.model)}, copy.deepcopy(stage.model.state_dict())
    stage.flag.write_text("hang")
    turns = stage.begin(stage.prompts(4), step=20)
    called, deadline = stage.flag.with_name("called"), time.monotonic() + scaled(60)
    called.unlink(missing_ok=True)
    for sent in range(3):  # the first finds sampling in the middle of a turn, the last finds trajectories at the tool
        while sent == 2 and not called.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        stage.sync(0.02)
        models[stage.version] = copy.deepcopy(stage.model)
        time.sleep(0.3)
    stage.flag.write_text("0")
    groups = turns.wait(NeverStop())
    stage.model.load_state_dict(original)  # which calls the tool, as other tests need it
    stage.sync(0.0)
    assert len(groups) == 4 and len(versions(groups)) > 1 and versions(groups) <= set(models)
    assert largest_log_prob_error(models, groups) <= 1e-4
    assert largest_log_prob_error(dict.fromkeys(models, stage.model), groups) > 0.01


def test_what_is_asked_for_during_an_update_is_of_the_new_weights(stage: Stage) -> None:
    """Nobody waits for the update: an engine begins a group when it has the weights that were sent before it."""
    stage.sync(0.0)
    [prompt] = stage.prompts(1)
    task = GroupTask(prompt, 29, (0, 1), Sampling())
    reference = stage.fleet.engines[0].call("run_group", task, stage.version + 1)
    assert not ray.wait([reference], timeout=1.0)[0]
    stage.sync(0.0)
    assert versions([Group(prompt, ray.get(reference, timeout=scaled(60)))]) == {stage.version}
    stage.fleet.stats()
    stage.version += 1
    stage.begin_send(stage.state(), stage.version)
    groups = stage.generate(stage.prompts(3), step=30)
    assert versions(groups) == {stage.version} and largest_log_prob_error(stage.model, groups) <= 1e-4
    assert stage.fleet.stats()["sync_by_tcp"] == 1


def test_groups_that_somebody_waits_for_are_played_among_others(stage: Stage) -> None:
    """As an evaluation is, while the next batches are sampled; both get what they would get alone."""
    prompts = stage.prompts(3)
    many = stage.prompts(48)  # the engine takes 17 at a time: the three are of the second lot at the latest
    alone, others = tokens(stage.generate(prompts, step=21)), tokens(stage.begin(many, step=22).wait(NeverStop()))
    turns = stage.begin(many, step=22)
    groups = stage.generate(prompts, step=21)
    assert stage.sampler.in_flight  # other groups are still sampled
    assert (tokens(groups), tokens(turns.wait(NeverStop()))) == (alone, others)
    assert not stage.sampler.in_flight


def test_turns_of_an_earlier_step_come_first_in_an_engine(stage: Stage) -> None:
    """Many wait, as it decodes 64 at once. The earlier ones have the tokens that they have alone."""
    [engine], order = stage.fleet.engines, list[int]()
    later, earlier = stage.prompts(144), stage.prompts(8)

    async def play(prompt: Prompt, step: int) -> Group:
        trajectories = await engine.sample(GroupTask(prompt, step, (0, 1, 2, 3), Sampling()))
        order.append(step)
        return Group(prompt, trajectories)

    async def both() -> list[Group]:
        tasks = [asyncio.create_task(play(prompt, 41)) for prompt in later]
        await asyncio.sleep(0.05)  # they have begun
        groups = await asyncio.gather(*(play(prompt, 40) for prompt in earlier))
        await asyncio.gather(*tasks)
        return groups

    alone = tokens(stage.generate(earlier, step=40))
    assert tokens(stage.loop.call(both())) == alone
    assert order.count(41) == len(later) and order[: len(order) // 2].count(40) == len(earlier), order
