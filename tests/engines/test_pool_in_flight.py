"""A real engine whose weights change, or that is asked for something else, while it plays groups."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Hashable

import pytest
import ray
import torch
from ray.exceptions import RayError
from transformers import PreTrainedModel

from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.tasks import GroupTask, Sampling
from ctpo_megatron.rollouts import Request, Scheduler
from ctpo_megatron.rollouts.request import tick
from ctpo_megatron.rollouts.scheduler import GroupOrder
from tests.engines.pool_helpers import Stage, largest_log_prob_error, tokens, trajectories, versions
from tests.support.deadlines import scaled

pytestmark = pytest.mark.timeout(600)


def background(stage: Stage) -> Scheduler:
    """As batches that are sampled ahead have it."""
    stage.fleet.wait_ready()
    return Scheduler.of(stage.fleet, background=True)


def queued(stage: Stage, count: int, step: int) -> Scheduler:
    scheduler = background(stage)
    for slot, prompt in enumerate(stage.prompts(count)):
        scheduler.add(slot, prompt, Request(step, 4, Sampling()))
    return scheduler


def play(turns: Scheduler, done: dict[Hashable, Group] | None = None) -> list[Group]:
    """The groups that are queued, and those that are `done` already."""
    done = {} if done is None else done
    deadline = time.monotonic() + scaled(120)
    while turns.pending and time.monotonic() < deadline:
        done |= dict(tick(turns, 0.2).groups)
    return [done[place] for place in sorted(done, key=str)]


def largest_error(models: dict[int, PreTrainedModel], groups: list[Group]) -> float:
    """Of all sampled tokens, against the model of the version that each is stamped with."""
    worst = 0.0
    for trajectory in trajectories(groups):
        ids = torch.tensor([trajectory.token_ids])
        for version, model in models.items():
            with torch.no_grad():
                expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            mine = torch.tensor(trajectory.weight_version[1:]) == version
            difference = (torch.tensor(trajectory.rollout_log_probs[1:]) - expected)[mine]
            worst = max(worst, float(difference.abs().max()) if mine.any() else 0.0)
    return worst


def test_every_token_has_the_log_prob_of_the_version_that_it_is_stamped_with(stage: Stage) -> None:
    stage.sync(0.0)
    models, original = {stage.version: copy.deepcopy(stage.model)}, copy.deepcopy(stage.model.state_dict())
    stage.flag.write_text("hang")
    turns, done = queued(stage, 4, step=20), dict[Hashable, Group]()
    called, deadline = stage.flag.with_name("called"), time.monotonic() + scaled(60)
    called.unlink(missing_ok=True)
    for sent in range(3):  # the first finds sampling in the middle of a turn, the last finds trajectories at the tool
        while sent == 2 and not called.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        done |= dict(tick(turns, 0.01).groups)
        with stage.fleet.lock:
            stage.sync(0.02)
        models[stage.version] = copy.deepcopy(stage.model)
        time.sleep(0.3)
    stage.flag.write_text("0")
    groups = play(turns, done)
    stage.model.load_state_dict(original)  # which calls the tool, as other tests need it
    stage.sync(0.0)
    assert len(groups) == 4 and len(versions(groups)) > 1 and versions(groups) <= set(models)
    assert largest_error(models, groups) <= 1e-4
    assert largest_error(dict.fromkeys(models, stage.model), groups) > 0.01


def test_what_is_asked_for_during_an_update_is_of_the_new_weights(stage: Stage) -> None:
    """Nobody waits for the update: an engine begins a group when it has the weights that were sent before it."""
    stage.sync(0.0)
    [prompt] = stage.prompts(1)
    task = GroupTask(prompt, 29, (0, 1), Sampling(), version=stage.version + 1)
    reference = stage.fleet.engines[0].call("run_group", task)
    assert not ray.wait([reference], timeout=1.0)[0]
    stage.sync(0.0)
    outcome = ray.get(reference, timeout=scaled(60))
    assert versions([Group(prompt, outcome.trajectories)]) == {stage.version}
    stage.fleet.stats()
    stage.version += 1
    stage.begin_send(stage.state(), stage.version)
    groups = stage.generate(stage.prompts(3), step=30)
    assert versions(groups) == {stage.version} and largest_log_prob_error(stage.model, groups) <= 1e-4
    assert stage.fleet.stats()["sync_by_file"] == 1


def test_groups_that_somebody_waits_for_are_played_among_others(stage: Stage) -> None:
    """As an evaluation is, while the next batches are sampled; both get what they would get alone."""
    prompts = stage.prompts(3)
    many = 48  # the engine takes 17 at a time: the three are of the second lot at the latest, and a third one follows
    alone, others = tokens(stage.generate(prompts, step=21)), tokens(play(queued(stage, many, step=22)))
    turns, found = queued(stage, many, step=22), list[Group]()
    thread = threading.Thread(target=lambda: found.extend(play(turns)))
    thread.start()
    groups = stage.generate(prompts, step=21)
    assert turns.pending  # others go on
    thread.join(scaled(120))
    assert (tokens(groups), sorted(tokens(found))) == (alone, sorted(others))
    assert not +stage.fleet.load


def test_groups_of_an_earlier_step_go_first(stage: Stage) -> None:
    """A retried or refilled one would hold the trainer up, behind a whole batch that it does not need yet."""
    turns, [first, *_] = queued(stage, 30, step=27), stage.prompts(1)
    turns.add("early", first, Request(26, 4, Sampling()))
    tick(turns, 0.0)
    assert "early" in {entry.job.slot for entry in turns._in_flight.values()} and turns.in_flight == 17
    turns.cancel()
    assert not turns.pending and not +stage.fleet.load


def test_groups_that_are_expected_to_take_long_are_begun_first(stage: Stage) -> None:
    """By their answers the last time; prompts that were not played yet by their own length. Others stay as they are."""
    lengths = {"a": 39, "short": 60, "b": 39, "new": 41, "c": 39, "long": 20}
    prompts = {name: Prompt(name, "test", (), "", (7,) * length) for name, length in lengths.items()}
    turns = background(stage)
    turns._order = GroupOrder()
    for name, answer in (("short", 3), ("long", 90)):
        played = Trajectory(name, 0, 0)
        played.append_context(prompts[name].token_ids, 0)
        played.append_model([1] * answer, [0.0] * answer, [0] * answer, 1)
        turns._order.note(prompts[name], [played])
    for prompt in prompts.values():
        turns.add(prompt.id, prompt, Request(28, 4, Sampling()))
    tick(turns, 0.0)
    begun = [entry.job.prompt.id for entry in turns._in_flight.values()]
    turns.cancel()
    assert begun == ["long", "new", "a", "b", "c", "short"]


def test_groups_that_are_not_needed_any_more_are_discarded(stage: Stage) -> None:
    prompts = stage.prompts(30)
    scheduler, done = queued(stage, 30, step=29), dict[Hashable, Group]()
    while len(done) < 3:
        done |= dict(tick(scheduler, 1.0).groups)
    scheduler.cancel()
    assert not scheduler.pending and not +stage.fleet.load
    ids = [group.prompt.id for group in done.values()]
    alone = stage.generate([prompt for prompt in prompts if prompt.id in ids], step=29)
    assert sorted(tokens(list(done.values()))) == sorted(tokens(alone))  # and the engine goes on sampling


@pytest.mark.slow
def test_nobody_waits_for_requests_of_an_engine_whose_update_failed(stage: Stage) -> None:
    """They go on with it, which kills vLLM's engine: its layers have lost their weights."""
    want = tokens(play(queued(stage, 4, step=23)))
    [engine] = stage.fleet._engines
    turns, done = queued(stage, 4, step=23), dict[Hashable, Group]()
    stage.fleet.stats()
    done |= dict(tick(turns, 0.0).groups)
    with pytest.raises(RayError, match="nowhere"):
        ray.get(engine.call("update_weights", {"path": "/nowhere"}, 99), timeout=scaled(60))
    assert tokens(play(turns, done)) == want  # on the engine that has replaced it
    assert stage.fleet.stats()["engine_restarts"] == 1
