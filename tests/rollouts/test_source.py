"""Batches of a recording: prompt order, what a cancelled batch leaves, and what a checkpoint keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ctpo_megatron.base.stop import Stop
from ctpo_megatron.config.rollout_schema import RolloutConfig
from ctpo_megatron.data import Prompt, PromptSampler, Trajectory
from ctpo_megatron.engines import GroupTask
from ctpo_megatron.rollouts import Quarantined, Replay, RolloutSettings
from ctpo_megatron.tracking import Phases
from tests.rollouts.scripted import ScriptedEngines, ScriptedScorer, quarantined, rollouts

PROMPTS = [Prompt(f"p{n}", "test", (), str(n), (1, 2, n + 3)) for n in range(10)]
CONFIG = RolloutConfig(prompts_per_step=2, samples_per_prompt=2)


def trajectory(prompt: Prompt, sample: int, version: int) -> Trajectory:
    result = Trajectory(prompt.id, sample, seed=sample)
    result.append_context(prompt.token_ids, turn=0)
    result.append_model([7, 8], [-0.5, -0.25], [version, version + 1], turn=1)
    result.finish_reason = "answer"
    return result


def recorded(step: int) -> list[Trajectory]:
    """What an unshuffled run over PROMPTS recorded in this step."""
    drawn = [PROMPTS[(2 * (step - 1) + place) % len(PROMPTS)] for place in range(2)]
    return [trajectory(prompt, sample, version=step) for prompt in drawn for sample in range(2)]


class RecordedPhases(Phases):
    """Keeps the names of the phases, and counts what advances."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.advanced = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield

    def advance(self) -> None:
        self.advanced += 1


class Run:
    """Rollouts over a recording, with everything that happens to them."""

    def __init__(self, stop: Stop | None = None) -> None:
        self.phases, self.scorer = RecordedPhases(), ScriptedScorer()
        self.engines = Replay(recorded, CONFIG)
        prompts = PromptSampler(PROMPTS, seed=0, shuffle=False)
        settings = RolloutSettings(CONFIG, steps=10)
        self.source = rollouts(settings, self.engines, self.scorer, prompts, stop, self.phases)


def test_a_batch_is_scored_and_says_where_it_comes_from() -> None:
    run = Run()
    batch = run.source.next_batch(1)
    assert batch is not None
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1"]
    assert [t.prompt_id for t in batch.trajectories] == ["p0", "p0", "p1", "p1"]
    assert [group.rewards for group in batch.groups] == [[0.0, 1.0], [0.0, 1.0]]
    assert batch.weight_versions == (1, 2)
    assert batch.sampler["consumed"] == ["p0", "p1"]
    assert batch.metrics["reward/mean"] == 0.5 and batch.metrics["rollout/quarantined"] == 0.0
    assert run.phases.names == ["rollout", "reward"] and run.phases.advanced == 2


def test_groups_are_scored_while_others_are_sampled() -> None:
    scorer, begun = ScriptedScorer(), list[int]()

    class Watched(ScriptedEngines):
        async def sample(self, engine: Any, task: GroupTask) -> list[Trajectory]:
            try:
                return await super().sample(engine, task)
            finally:
                begun.append(len(scorer.begun))

    settings = RolloutSettings(CONFIG.model_copy(update={"prompts_per_step": 8}), steps=10)
    source = rollouts(settings, Watched(), scorer, PromptSampler(PROMPTS, seed=0))
    batch = source.next_batch(1)
    assert batch is not None and [group.rewards for group in batch.groups] == [[0.0, 1.0]] * 8
    assert begun[0] == 0 and begun[-1] >= 4


def test_a_cancelled_batch_consumes_nothing() -> None:
    stop, engines = threading.Event(), ScriptedEngines(stuck=[(2, 1)])
    prompts = PromptSampler(PROMPTS, seed=0, shuffle=False)
    source = rollouts(RolloutSettings(CONFIG, steps=10), engines, ScriptedScorer(), prompts, stop)
    assert source.next_batch(1) is not None
    threading.Timer(0.1, stop.set).start()
    assert source.next_batch(2) is None and engines.in_flight == 0
    assert source.state_dict()["prompts"]["consumed"] == ["p0", "p1"]
    stop.clear()
    engines.stuck.clear()
    again = source.next_batch(2)
    assert again is not None and [group.prompt.id for group in again.groups] == ["p2", "p3"]


def test_a_resumed_source_goes_on_and_remembers_its_quarantine() -> None:
    before, after = Run(), Run()
    before.source.next_batch(1)
    quarantined(before.source).append(Quarantined("p9", 1, "it hung"))
    after.source.load_state_dict(before.source.state_dict())
    assert quarantined(after.source) == [Quarantined("p9", 1, "it hung")]
    batch = after.source.next_batch(2)
    assert batch is not None and [group.prompt.id for group in batch.groups] == ["p2", "p3"]
