"""A recording in place of engines: what it answers, and what it refuses with step and prompt."""

from __future__ import annotations

import pytest

from ctpo_megatron.data.records import Prompt, Trajectory
from ctpo_megatron.rollout import Replay, ReplayError, RolloutFleet, Sampling

SAMPLING = Sampling(1.0, 1.0, 0)


def prompt(name: str) -> Prompt:
    return Prompt(name, "source", (), "1", (5, 6))


def trajectory(name: str, sample: int) -> Trajectory:
    found = Trajectory(name, sample, seed=0)
    found.append_context([5, 6], turn=0)
    found.append_model([7, 8 + sample], [-0.1, -0.2], [1, 1], turn=1)
    return found


def replay(*names: str) -> Replay:
    return Replay(lambda step: [trajectory(name, sample) for name in names for sample in (0, 1)] if step == 3 else [])


def test_groups_come_back_as_recorded_even_when_a_prompt_is_drawn_twice() -> None:
    drawn = [prompt("a"), prompt("b"), prompt("a")]
    with replay("a", "b", "a") as fleet:
        fleet.start()
        groups = fleet.generate(drawn, step=3, samples=2, sampling=SAMPLING)
    assert [group.prompt.id for group in groups] == ["a", "b", "a"]
    assert [[t.token_ids[-1] for t in group.trajectories] for group in groups] == [[8, 9]] * 3


@pytest.mark.parametrize(
    ("drawn", "step", "message"),
    [
        (["a", "c"], 3, r"step 3, prompt 2 of the batch, sample 0: the run draws prompt 'c', .* has prompt 'b'"),
        (["a"], 3, r"step 3: 4 trajectories were recorded, 1 prompts x 2 samples"),
        (["a", "b"], 4, r"step 4: 0 trajectories were recorded, 2 prompts x 2 samples"),
    ],
)
def test_another_draw_is_refused(drawn: list[str], step: int, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        replay("a", "b").generate([prompt(n) for n in drawn], step=step, samples=2, sampling=SAMPLING)


def test_a_prompt_of_other_tokens_is_refused() -> None:
    other = Prompt("a", "source", (), "1", (5, 9))
    with pytest.raises(ReplayError, match="prompt 'a' was recorded with other tokens"):
        replay("a").generate([other], step=3, samples=2, sampling=SAMPLING)


def test_weights_are_taken_to_the_end_and_the_counts_have_the_fleets_names() -> None:
    left = iter([("a", None), ("b", None)])
    replay("a").sync(left, 1)
    assert list(left) == []
    counts = replay("a").stats()
    assert set(counts.values()) == {0.0}
    assert counts.keys() == RolloutFleet.stats(_WithoutEngines()).keys()


class _WithoutEngines(RolloutFleet):
    def __init__(self) -> None:
        self._counts = {}
