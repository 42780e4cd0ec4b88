"""A prompt that a step draws more than once gives groups of its own; one that it draws once has its usual seeds."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Batch, Prompt, PromptSampler
from ctpo_megatron.environments.seeds import trajectory_seed
from ctpo_megatron.rollouts import Rollouts, RolloutSettings
from tests.rollouts import scripted
from tests.rollouts.scripted import ScriptedEngines, ScriptedScorer

SAMPLES = 2


def rollouts(engines: ScriptedEngines, prompts: int, **settings: Any) -> Rollouts:
    """Batches of 8 prompts. One prompt of two has both outcomes."""
    data = [Prompt(f"p{n}", "test", (), str(n), (1, n + 3)) for n in range(prompts)]
    config = RolloutConfig(**{"prompts_per_step": 8, "samples_per_prompt": SAMPLES, "group_timeout_s": 20} | settings)
    scorer = ScriptedScorer(lambda prompt, sample: float(sample * (int(prompt[1:]) % 2)))
    sampler = PromptSampler(data, seed=0)
    return scripted.rollouts(RolloutSettings(config, 100, 4), engines, scorer, sampler)


def seeds(batch: Batch, step: int) -> dict[str, list[int]]:
    """Prompt -> which draws its groups are of, as their seeds say."""
    found = defaultdict(list)
    for group in batch.groups:
        mine = [trajectory.seed for trajectory in group.trajectories]
        named = [[trajectory_seed(0, step, group.prompt.id, n, draw) for n in range(SAMPLES)] for draw in range(99)]
        found[group.prompt.id].append(named.index(mine))
    return found


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("count", [1, 3, 7, 8, 10, 13])
def test_groups_of_one_prompt_have_seeds_of_their_own(count: int, ahead: int) -> None:
    engines = ScriptedEngines()
    with rollouts(engines, count, max_staleness=ahead) as source:
        repeated = 0
        for step in range(1, 7):
            source.publish(None, step)  # type: ignore[arg-type]
            batch = source.next_batch(step)
            assert batch is not None
            for numbers in seeds(batch, step).values():
                assert numbers == list(range(len(numbers)))  # in the order of the draw, and the first is as ever
                repeated += len(numbers) - 1
    assert (repeated > 0) is (count != 8)


@pytest.mark.parametrize("lost", [(), ("p1", "p4")])
def test_refills_and_replacements_have_seeds_of_their_own(lost: Iterable[str]) -> None:
    engines = ScriptedEngines(lost=lost)
    source, most = rollouts(engines, 6, uniform_groups="refill"), 0
    for step in range(1, 5):
        batch = source.next_batch(step)
        assert batch is not None
        for numbers in seeds(batch, step).values():
            assert sorted(numbers) == list(range(len(numbers)))  # a replacement is drawn late, for an early place
            most = max(most, *numbers)
    assert most >= 2


def test_a_group_that_came_too_late_keeps_its_number() -> None:
    engines = ScriptedEngines(stuck=[(1, 0)])  # the only first draw of its prompt
    source = rollouts(engines, 10, oversample=4, uniform_groups="refill", max_refills=2)
    batch = source.next_batch(1)
    assert batch is not None and batch.metrics["rollout/late_groups"] >= 1
    for numbers in seeds(batch, 1).values():
        assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("stuck", [(), (0, 3, 6), range(8)])
def test_a_resumed_run_samples_what_was_in_flight_with_the_same_seeds(stuck: Iterable[int]) -> None:
    def told(batch: Batch | None) -> list[tuple[str, int]]:
        assert batch is not None
        return [(trajectory.prompt_id, trajectory.seed) for trajectory in batch.trajectories]

    engines = ScriptedEngines(stuck=[(2, place) for place in stuck])
    with rollouts(engines, 5, max_staleness=1) as source:
        source.publish(None, 1)  # type: ignore[arg-type]
        assert source.next_batch(1) is not None
        state = copy.deepcopy(source.state_dict())
        engines.stuck.clear()
        source.publish(None, 2)  # type: ignore[arg-type]
        whole = [told(source.next_batch(step)) for step in (2, 3)]
    again = rollouts(ScriptedEngines(seed=9), 5, max_staleness=1)
    again.load_state_dict(state)
    with again:
        again.publish(None, 2)  # type: ignore[arg-type]
        assert [told(again.next_batch(step)) for step in (2, 3)] == whole
