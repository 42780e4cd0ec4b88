"""A prompt that a step draws more than once gives groups of its own; one that it draws once has its usual seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from ctpo_megatron.data import Batch, Prompt, PromptSampler
from ctpo_megatron.environments import trajectory_seed
from tests.rollouts.scripted import ScriptedEngines, ScriptedScorer
from tests.rollouts.test_rollouts import Run


def run_of(count: int, engines: ScriptedEngines | None = None, **settings: Any) -> Run:
    """Batches of 8 of `count` prompts. One prompt of two has both outcomes."""
    prompts = PromptSampler([Prompt(f"p{n}", "test", (), str(n), (1, n + 3)) for n in range(count)], seed=0)
    scorer = ScriptedScorer(lambda prompt, sample: float(sample * (int(prompt[1:]) % 2)))
    return Run(engines, prompts=prompts, scorer=scorer, prompts_per_step=8, **settings)


def draws(run: Run) -> list[list[int]]:
    """Of each step and prompt, which draws its groups are of, as their seeds say."""
    found = defaultdict(list)
    for step, batch in enumerate(run.trained, start=1):
        for group in batch.groups:
            named = [[trajectory_seed(0, step, group.prompt.id, n, draw) for n in range(2)] for draw in range(99)]
            mine = named.index([trajectory.seed for trajectory in group.trajectories])
            found[step, group.prompt.id].append(mine)
    return list(found.values())


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("count", [1, 3, 7, 8, 10, 13])
def test_groups_of_one_prompt_have_seeds_of_their_own(count: int, ahead: int) -> None:
    with run_of(count, max_staleness=ahead).going() as run:
        found = draws(run.train())
    assert all(numbers == list(range(len(numbers))) for numbers in found)  # by the draw, and the first is as ever
    assert any(len(numbers) > 1 for numbers in found) is (count != 8)


@pytest.mark.parametrize("lost", [(), ("p1", "p4")])
def test_refills_and_replacements_have_seeds_of_their_own(lost: Iterable[str]) -> None:
    with run_of(6, ScriptedEngines(lost=lost), max_staleness=0, uniform_groups="refill").going() as run:
        found = draws(run.train(until=4))
    # A replacement is drawn late, for an early place.
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in found)
    assert max(map(max, found)) >= 2


def test_a_group_that_came_too_late_keeps_its_number() -> None:
    engines = ScriptedEngines(stuck=[(1, 0)])  # the only first draw of its prompt
    settings = {"max_staleness": 0, "oversample": 4, "uniform_groups": "refill", "max_refills": 2}
    with run_of(10, engines, **settings).going() as run:
        run.train(until=1)
    assert run.trained[0].metrics["rollout/late_groups"] >= 1
    assert all(len(set(numbers)) == len(numbers) for numbers in draws(run))


@pytest.mark.parametrize("stuck", [(), (0, 3, 6), range(8)])
def test_a_resumed_run_samples_what_was_in_flight_with_the_same_seeds(stuck: Iterable[int]) -> None:
    def told(batches: list[Batch]) -> list[list[tuple[str, int]]]:
        return [[(trajectory.prompt_id, trajectory.seed) for trajectory in batch.trajectories] for batch in batches]

    with run_of(5, ScriptedEngines(stuck=[(2, place) for place in stuck])).going() as whole:
        whole.train(until=1)
        state = whole.state()
        whole.engines.stuck.clear()
        whole.train(until=3)
    with run_of(5, ScriptedEngines(seed=9), done=1, state=state).going() as again:
        assert told(again.train(until=3).trained) == told(whole.trained[1:])
