"""Dynamic sampling: which groups are trained on, that every prompt is accounted for, resume and replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Batch, Group, Prompt, PromptSampler, Trajectory
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.rewards import ScoreReport
from ctpo_megatron.rollouts import Replay, ReplayError, Rollouts
from ctpo_megatron.tracking import recorded_trajectories, trajectory_files, write_trajectories
from tests.rollouts.scripted import UNJUDGED, ScriptedEngines, ScriptedScorer, quarantined
from tests.rollouts.test_rollouts import Run

PROMPTS = [Prompt(f"p{n}", "test", (), str(n), (1, 2, n + 3)) for n in range(40)]
ORDER = [prompt.id for prompt in PromptSampler(PROMPTS, seed=0).take(120)]
LOST = (ORDER[1], ORDER[6], ORDER[9], ORDER[10])
CONFIG = RolloutConfig(prompts_per_step=4, samples_per_prompt=2)


def is_mixed(prompt_id: str) -> bool:
    """What the made-up rewards of a prompt are; a good third has both outcomes."""
    return int(prompt_id[1:]) % 8 in (0, 3, 5)


def reward(prompt_id: str, sample: int) -> float:
    """0 and 1 for prompts with both outcomes, 0 for others."""
    return float(sample) if is_mixed(prompt_id) else 0.0


def source(
    engines: Any | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    reward: Callable[[str, int], float | None] = reward,
    **settings: Any,
) -> Rollouts:
    parts: dict[str, Any] = {"scorer": ScriptedScorer(reward), "max_staleness": 0} | settings
    return Run(engines, prompts=PromptSampler(prompts, seed=0), **parts).source


def batches(sampled: Rollouts, steps: Iterable[int]) -> list[Batch]:
    return [batch for step in steps if (batch := sampled.next_batch(step)) is not None]


def ids(groups: Iterable[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


def dropped(batch: Batch) -> list[Group]:
    return [group for group in batch.groups if group.dropped]


def test_all_groups_are_kept_by_default() -> None:
    (batch,) = batches(source(), [1])
    assert batch.trained == batch.groups and len(batch.groups) == 4
    assert not any("groups_" in name or name == "rollout/refills" for name in batch.metrics)


@pytest.mark.parametrize("mini", [1, 2, 4])
def test_dropped_groups_leave_in_whole_optimizer_steps(mini: int) -> None:
    kept = batches(source(mini=mini), range(1, 9))
    sizes = set()
    for all_of_it, batch in zip(kept, batches(source(mini=mini, uniform_groups="drop"), range(1, 9)), strict=True):
        assert ids(batch.groups) == ids(all_of_it.groups)  # the same prompts are drawn
        mixed = [name for name in ids(batch.groups) if is_mixed(name)]
        assert set(mixed) <= set(ids(batch.trained)) and not any(map(is_mixed, ids(dropped(batch))))
        assert len(batch.trained) == mini * max(1, -(-len(mixed) // mini))
        assert batch.metrics["rollout/groups_uniform"] == 1 - len(mixed) / 4
        assert batch.metrics["rollout/groups_dropped"] == len(dropped(batch)) == 4 - len(batch.trained)
        assert batch.metrics["reward/mean"] == len(mixed) / 8  # of all that were sampled
        sizes.add(len(batch.trained))
    assert sizes == {1: {1, 2, 3}, 2: {2, 4}, 4: {4}}[mini]


def test_refills_fill_the_batch_with_the_next_prompts_of_the_order() -> None:
    drawn = 0
    for batch in batches(source(uniform_groups="refill"), range(1, 7)):
        assert len(batch.trained) == 4 and all(map(is_mixed, ids(batch.trained)))
        assert ids(batch.groups) == ORDER[drawn : drawn + len(batch.groups)]
        assert ids(batch.trained) == [name for name in ids(batch.groups) if is_mixed(name)]
        drawn += len(batch.groups)
        assert 1 <= batch.metrics["rollout/refills"] <= 10
        assert batch.metrics["rollout/groups_dropped"] == len(batch.groups) - 4
        assert batch.metrics["reward/mean"] == 2 / len(batch.groups)
        assert batch.metrics["tokens/model"] == 2 * 2 * len(batch.groups)
    assert drawn > 40  # an epoch ended within a batch


def test_refills_are_bounded_and_then_the_batch_is_smaller() -> None:
    for batch in batches(source(uniform_groups="refill", max_refills=1), range(1, 9)):
        mixed = sum(map(is_mixed, ids(batch.groups)))
        assert batch.metrics["rollout/refills"] == 1
        assert len(batch.trained) == max(2, mixed + mixed % 2)


def test_a_batch_without_any_mixed_group_still_makes_one_optimizer_step() -> None:
    uniform = [prompt for prompt in PROMPTS if not is_mixed(prompt.id)]
    (batch,) = batches(source(prompts=uniform, uniform_groups="refill", max_refills=3), [1])
    assert len(batch.groups) == 16 and len(batch.trained) == 2
    assert batch.metrics["rollout/groups_uniform"] == 1.0 and batch.metrics["rollout/refills"] == 3.0


def told(batch: Batch) -> tuple[Any, ...]:
    """What a batch trains on, drops, reports and leaves behind."""
    metrics = {name: value for name, value in batch.metrics.items() if name != "rollout/generate_s"}
    return ids(batch.trained), ids(dropped(batch)), metrics, batch.weight_versions


def test_a_resumed_source_draws_the_same_prompts() -> None:
    whole, again = (source(ScriptedEngines(lost=LOST), uniform_groups="refill") for _ in range(2))
    first = batches(whole, (1, 2))
    state = whole.state_dict()
    again.load_state_dict(state)
    assert state["prompts"]["consumed"][-len(first[-1].groups) :][-1] == ids(first[-1].groups)[-1]
    rest = [told(batch) for batch in batches(whole, (3, 4, 5))]
    assert [told(batch) for batch in batches(again, (3, 4, 5))] == rest


def record(folder: Path, batch: Batch, step: int) -> None:
    write_trajectories(folder, step, batch.groups, lambda _: "")


def replayed(folder: Path, **settings: Any) -> Replay:
    files = trajectory_files(folder)
    read = lambda step: recorded_trajectories(files[step])  # noqa: E731
    return Replay(read, CONFIG.model_copy(update=settings))


def test_a_replay_with_other_rewards_is_refused(tmp_path: Path) -> None:
    for step, batch in enumerate(batches(source(uniform_groups="refill"), (1, 2)), start=1):
        record(tmp_path, batch, step)
    fewer = source(replayed(tmp_path, uniform_groups="refill"), uniform_groups="refill", max_refills=1)
    with pytest.raises(ReplayError, match=r"step 1: \d+ more groups were recorded than this run asks for: refi"):
        fewer.next_batch(1)
    larger = {"uniform_groups": "refill", "prompts_per_step": 30}
    more = source(replayed(tmp_path, **larger), **larger)
    with pytest.raises(ReplayError, match=r"step 1: \d+ trajectories were recorded, 30 prompts x 2 samples are needed"):
        more.next_batch(1)


def test_a_batch_cancelled_in_a_refill_consumes_nothing() -> None:
    (batch,) = batches(source(uniform_groups="refill"), [1])
    stop, engines = threading.Event(), ScriptedEngines(stuck=[(1, 5)])
    cancelled = source(engines, stop=stop, uniform_groups="refill")
    threading.Timer(0.2, stop.set).start()
    assert cancelled.next_batch(1) is None and len(engines.begun) > 5
    assert cancelled.state_dict()["prompts"]["consumed"] == []
    stop.clear()
    engines.stuck.clear()
    again = cancelled.next_batch(1)
    assert again is not None and told(again) == told(batch)


FAILED = NoVerdict("timeout", "the scorer was killed after 5 s")


def judged(*rewards: float | None) -> Group:
    """A group of these rewards; None: no verdict."""
    samples = [Trajectory("p", n, 0, reward=r, no_verdict=FAILED if r is None else None) for n, r in enumerate(rewards)]
    return Group(PROMPTS[0], samples)


@pytest.mark.parametrize(
    ("rewards", "uniform", "unjudged"),
    [
        ((0, 1, None), False, False),
        ((0, 0, None), True, False),
        ((1, None, None), True, True),
        ((None, None, None), True, True),
        ((0, 1, 1), False, False),
        ((1,), True, False),
        ((None,), True, True),
    ],
)
def test_a_group_is_uniform_by_its_verdicts(rewards: tuple[float | None, ...], uniform: bool, unjudged: bool) -> None:
    group = judged(*rewards)
    assert (not group.is_mixed(by_turn=False), group.unjudged) == (uniform, unjudged)


@pytest.mark.parametrize(("by_turn", "left"), [(False, [True, True, False]), (True, [False, True, False])])
def test_credit_by_turn_keeps_groups_whose_totals_are_equal(by_turn: bool, left: list[bool]) -> None:
    class ByTurn(ScriptedScorer):
        async def score(self, groups: Sequence[Group]) -> ScoreReport:
            report = await super().score(groups)
            for trajectory in groups[0].trajectories:
                trajectory.turn_rewards = turns[trajectory.prompt_id][trajectory.sample_index]
                trajectory.reward = sum(trajectory.turn_rewards)
            return report

    turns = {"p0": [[1.0, 0.0], [0.0, 1.0]], "p1": [[1.0, 0.0], [1.0, 0.0]], "p2": [[1.0, 1.0], [0.0, 0.0]]}
    settings = {"uniform_groups": "drop", "prompts_per_step": 3, "mini": 1, "by_turn": by_turn}
    (batch,) = batches(source(prompts=PROMPTS[:3], scorer=ByTurn(), **settings), [1])
    assert [name in ids(dropped(batch)) for name in turns] == left
    assert batch.metrics["rollout/groups_uniform"] == sum(left) / 3


def test_groups_that_nobody_judged_are_the_first_to_leave() -> None:
    """The last optimizer step is filled with equal verdicts rather than with none."""
    rewards = {"p0": (0, 1), "p1": (1, 1), "p2": (None, 1), "p3": (0, 0), "p4": (None, None)}
    settings = {"uniform_groups": "drop", "prompts_per_step": 5, "mini": 3}
    (batch,) = batches(source(None, PROMPTS[:5], lambda prompt, sample: rewards[prompt][sample], **settings), [1])
    assert sorted(ids(dropped(batch))) == ["p2", "p4"]


def without_verdicts(prompt_id: str, sample: int) -> float | None:
    """One prompt in three has none, and is no better than a uniform one."""
    return None if int(prompt_id[1:]) % 3 == 0 else float(sample)


@pytest.mark.parametrize("mode", ["keep", "drop", "refill"])
def test_a_replay_gives_the_same_batches_also_of_what_nobody_judged(tmp_path: Path, mode: str) -> None:
    settings: dict[str, Any] = {"uniform_groups": mode, "reward": without_verdicts}
    live = batches(source(ScriptedEngines(lost=LOST), **settings), range(1, 6))
    for step, batch in enumerate(live, start=1):
        record(tmp_path, batch, step)
    recorded = [t for file in trajectory_files(tmp_path).values() for t in recorded_trajectories(file)]
    lost = [t for t in recorded if t.no_verdict is not None]
    assert lost and all(t.reward is None and t.no_verdict == UNJUDGED for t in lost)
    if mode == "keep":
        assert not any(mask for t in lost for mask in t.loss_mask) and any(t.response_mask for t in lost)
    if mode == "refill":
        assert all(t.no_verdict is None for batch in live for t in batch.trajectories)
    again = source(replayed(tmp_path, uniform_groups=mode), **settings)
    for batch, found in zip(live, batches(again, range(1, 6)), strict=True):
        assert told(found) == told(batch) and found.trajectories == batch.trajectories
    assert {each.prompt_id for each in quarantined(again)} == set(LOST)
