"""Recorded trajectories instead of engines: the same training again, without vLLM, Ray or a sandbox."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupLost, GroupTask, pool_stats
from ctpo_megatron.engines.weights import OffersWeights

_SHOWN = 5


class ReplayError(Exception):
    """The recording is not of what this run asks for; the message names step, prompt and what was recorded."""


class Replay:
    """What a `GroupSampler` uses in place of an `EnginePool`: one engine that answers with what another run recorded.

    recorded: step -> the trajectories of its dump, group by group in sample order. The sampling distribution is the
    recording's. A prompt that the recorded run lost is lost here, too, and replaced by the next one.
    """

    name, index, live = "the recording", 0, True

    def __init__(self, recorded: Callable[[int], list[Trajectory]], config: RolloutConfig) -> None:
        self._recorded, self._config = recorded, config
        self._step, self._groups = -1, dict[str, list[list[Trajectory]]]()
        self._lost, self._given = 0, set[tuple[str, int]]()
        self.counts: Counter[str] = Counter()

    @property
    def engines(self) -> Sequence[Replay]:
        """Itself."""
        return [self]

    async def sample(self, _engine: Replay, task: GroupTask) -> list[Trajectory]:
        """The recorded group of a prompt. Raises ReplayError, and GroupLost for a prompt that was not recorded."""
        if task.step != self._step:
            self._read(task.step)
        prompt, there = task.prompt, self._groups.get(task.prompt.id, [])
        if task.occurrence >= len(there):
            self._lost += 1
            rest = [name for name, groups in self._groups.items() if (name, len(groups) - 1) not in self._given]
            names = ", ".join(map(repr, rest[:_SHOWN])) or "no more"
            why = f"step {task.step}: the run draws prompt {prompt.id!r}, the recording has {names}"
            if not rest or self._lost > self._config.max_quarantined:
                raise ReplayError(f"{why}: give data.train, data.shuffle, run.seed and reward.* as in the recorded run")
            raise GroupLost(why)
        group = there[task.occurrence]
        self._given.add((prompt.id, task.occurrence))
        if [trajectory.sample_index for trajectory in group] != list(task.samples):
            raise ReplayError(
                f"step {task.step}, prompt {prompt.id!r}: {len(group)} trajectories were recorded, {len(task.samples)} "
                "samples are needed: set rollout.samples_per_prompt as in the recorded run"
            )
        if any(t.token_ids[: len(prompt.token_ids)] != list(prompt.token_ids) for t in group):
            raise ReplayError(
                f"step {task.step}: prompt {prompt.id!r} was recorded with other tokens than this tokenizer and chat "
                "template give: use the recorded run's model.path, chat template, rollout.tool_parser and "
                "data.system_prompt"
            )
        return group

    def _read(self, step: int) -> None:
        config, trajectories = self._config, self._recorded(step)
        needed = config.prompts_per_step * config.samples_per_prompt
        if len(trajectories) < needed or (len(trajectories) > needed and config.uniform_groups != "refill"):
            raise ReplayError(
                f"step {step}: {len(trajectories)} trajectories were recorded, {config.prompts_per_step} prompts x "
                f"{config.samples_per_prompt} samples are needed: set rollout.prompts_per_step and "
                "rollout.samples_per_prompt as in the recorded run"
            )
        groups: defaultdict[str, list[list[Trajectory]]] = defaultdict(list)
        for trajectory in trajectories:
            if trajectory.sample_index == 0:
                groups[trajectory.prompt_id].append([])
            groups[trajectory.prompt_id][-1].append(trajectory)
        self._step, self._groups, self._given = step, dict(groups), set()

    def stats(self) -> dict[str, float]:
        """The names that `EnginePool.stats` has; all but `quarantined` are 0.

        Comes after the last group of a step. Raises ReplayError when more groups of it were recorded.
        """
        if rest := sum(map(len, self._groups.values())) - len(self._given):
            raise ReplayError(
                f"step {self._step}: {rest} more groups were recorded than this run asks for: refills follow from the "
                "rewards, so give reward.* and rollout.max_refills as in the recorded run"
            )
        counts = dict(self.counts)
        self.counts.clear()
        return pool_stats(counts)

    def wait_ready(self) -> None:
        """Nothing has to start."""

    def send(self, trainer: OffersWeights, version: int) -> None:
        """Nothing samples with the weights."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Every prompt has room."""

    async def check(self, _engine: Replay) -> None:
        """It always answers."""

    async def changed(self) -> None:
        """It never dies."""
        await asyncio.Event().wait()

    def note_load(self, index: int, samples: int) -> None:
        """Nothing is in flight for long."""
