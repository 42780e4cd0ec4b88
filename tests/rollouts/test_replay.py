"""A recording in place of engines: what it answers, and what it refuses with step and prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.engines import GroupLost, GroupTask, Sampling
from ctpo_megatron.rollouts import Replay, ReplayError

SAMPLING = Sampling(1.0, 1.0, 0)


def answer(replay: Replay, prompts: list[Prompt], step: int = 3, samples: int = 2) -> list[Group]:
    """What the recording has for the prompts."""

    async def sampled() -> list[Group]:
        draws = [prompts[:place].count(each) for place, each in enumerate(prompts)]
        shape = step, tuple(range(samples)), SAMPLING
        tasks = [GroupTask(each, *shape, occurrence=draw) for each, draw in zip(prompts, draws, strict=True)]
        return [Group(task.prompt, await replay.sample(replay, task)) for task in tasks]

    return asyncio.run(sampled())


def prompt(name: str) -> Prompt:
    return Prompt(name, "source", (), "1", (5, 6))


def trajectory(name: str, sample: int) -> Trajectory:
    found = Trajectory(name, sample, seed=0)
    found.append_context([5, 6], turn=0)
    found.append_model([7, 8 + sample], [-0.1, -0.2], [1, 1], turn=1)
    return found


def recording(names: Iterable[str]) -> Callable[[int], list[Trajectory]]:
    return lambda step: [trajectory(name, sample) for name in names for sample in (0, 1)] if step == 3 else []


def replay(*names: str, prompts: int | None = None, lost: int = 0) -> Replay:
    """Of a run with so many prompts a step, that may have lost some."""
    shape = {"prompts_per_step": len(names) if prompts is None else prompts, "samples_per_prompt": 2}
    return Replay(recording(names), RolloutConfig(**shape, max_quarantined=lost))


def test_groups_come_back_as_recorded_even_when_a_prompt_is_drawn_twice() -> None:
    drawn = [prompt("a"), prompt("b"), prompt("a")]
    groups = answer(replay("a", "b", "a"), drawn)
    assert [group.prompt.id for group in groups] == ["a", "b", "a"]
    assert [[t.token_ids[-1] for t in group.trajectories] for group in groups] == [[8, 9]] * 3


@pytest.mark.parametrize(
    ("drawn", "shape", "message"),
    [
        ("ac", {}, r"step 3: the run draws prompt 'c', the recording has 'b': give data.train, data.shuffle"),
        ("a", {"prompts": 1}, r"step 3: 4 trajectories were recorded, 1 prompts x 2 samples"),
        ("a", {"step": 4}, r"step 4: 0 trajectories were recorded, 2 prompts x 2 samples"),
        ("a", {"samples": 1}, r"step 3, prompt 'a': 2 trajectories were recorded, 1 samples are needed"),
    ],
)
def test_another_draw_is_refused(drawn: str, shape: dict[str, int], message: str) -> None:
    recorded = replay("a", "b", prompts=shape.pop("prompts", 2))
    with pytest.raises(ReplayError, match=message):
        answer(recorded, [prompt(n) for n in drawn], **shape)


def test_a_prompt_that_the_recorded_run_lost_is_lost() -> None:
    recorded = replay("a", "d", lost=2)
    assert [group.prompt.id for group in answer(recorded, [prompt("a")])] == ["a"]
    with pytest.raises(GroupLost, match="the run draws prompt 'b', the recording has 'd'"):
        answer(recorded, [prompt("b")])
    assert [group.prompt.id for group in answer(recorded, [prompt("d")])] == ["d"]
    with pytest.raises(ReplayError, match="the run draws prompt 'c', the recording has no more"):
        answer(recorded, [prompt("c")])


def test_what_is_not_requested_is_an_error() -> None:
    recorded = replay("a", "b")
    answer(recorded, [prompt("a")])
    with pytest.raises(ReplayError, match="step 3: 1 more groups were recorded than this run asks for"):
        recorded.stats()


def test_a_prompt_of_other_tokens_is_refused() -> None:
    other = Prompt("a", "source", (), "1", (5, 9))
    with pytest.raises(ReplayError, match="prompt 'a' was recorded with other tokens"):
        answer(replay("a"), [other])


def test_weights_go_to_the_engines_that_evaluate() -> None:
    """Without engines they go nowhere."""
    sent: list[tuple[object, int]] = []

    class Engines:
        def send(self, trainer: object, version: int) -> None:
            sent.append((trainer, version))

    shape = RolloutConfig(prompts_per_step=1, samples_per_prompt=2)
    trainer: Any = object()
    engines: Any = Engines()
    Replay(recording("a"), shape, engines).send(trainer, 3)
    Replay(recording("a"), shape).send(trainer, 4)
    assert sent == [(trainer, 3)]
