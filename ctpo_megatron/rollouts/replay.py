"""Recorded trajectories in place of sampled ones. Without evaluations no vLLM, Ray or sandbox is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Trajectory
from ctpo_megatron.engines import GroupLost, GroupTask

if TYPE_CHECKING:
    from ctpo_megatron.engines import EnginePool
    from ctpo_megatron.engines.weights import SendsWeights

_SHOWN = 5


class ReplayError(Exception):
    """The recording is not of what this run asks for; the message names step, prompt and what was recorded."""


class Replay:
    """What a `GroupSampler` uses in place of an `EnginePool`: one engine that answers with what another run recorded.

    recorded: step -> the trajectories of its dump, group by group in sample order. A prompt that the recorded run lost
    is lost here, too, and replaced by the next one. evaluating: the engines that answer the held-out prompts, which get
    the weights that are sent here; None without evaluations.
    """

    name, index, live, failure = "the recording", 0, True, None

    def __init__(
        self,
        recorded: Callable[[int], list[Trajectory]],
        config: RolloutConfig,
        evaluating: EnginePool | None = None,
    ) -> None:
        self._recorded, self._config, self._evaluating = recorded, config, evaluating
        self._step, self._lost = -1, 0
        # Groups of the step that were not asked for yet, by prompt and occurrence.
        self._groups: dict[tuple[str, int], list[Trajectory]] = {}
        self.counts: Counter[str] = Counter()
        self.engines: Sequence[Replay] = [self]
        self.observers: list[Callable[[], None]] = []

    async def sample(self, _engine: Replay, task: GroupTask) -> list[Trajectory]:
        """Return the recorded group of a prompt. Raises ReplayError, and GroupLost for a prompt that was not
        recorded.
        """
        if task.step != self._step:
            self._read(task.step)
        prompt, group = task.prompt, self._groups.pop((task.prompt.id, task.occurrence), None)
        if group is None:
            self._lost += 1
            rest = list(dict.fromkeys(name for name, _ in self._groups))
            names = ", ".join(map(repr, rest[:_SHOWN])) or "no more"
            why = f"step {task.step}: the run draws prompt {prompt.id!r}, the recording has {names}"
            if not rest or self._lost > self._config.max_quarantined:
                raise ReplayError(f"{why}: give data.train, data.shuffle, run.seed and reward.* as in the recorded run")
            raise GroupLost(why)
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
        self._step, self._groups = step, {}
        occurrences: Counter[str] = Counter()
        for trajectory in trajectories:
            occurrences[trajectory.prompt_id] += trajectory.sample_index == 0
            key = trajectory.prompt_id, occurrences[trajectory.prompt_id] - 1
            self._groups.setdefault(key, []).append(trajectory)

    def stats(self) -> dict[str, float]:
        """Return as `EnginePool.stats`, after a step. Raises ReplayError when it has more groups."""
        if self._groups:
            raise ReplayError(
                f"step {self._step}: {len(self._groups)} more groups were recorded than this run asks for: refills "
                "follow from the rewards, so give reward.* and rollout.max_refills as in the recorded run"
            )
        counts, self.counts = self.counts, Counter()
        return {**counts}

    def wait_ready(self, *_: object) -> None:
        """Nothing has to start."""

    def send(self, trainer: SendsWeights, version: int) -> None:
        """Hand the weights on to the engines that evaluate, as `EnginePool.send`; a recording takes none."""
        if self._evaluating is not None:
            self._evaluating.send(trainer, version)

    async def check(self, _engine: Replay) -> None:
        """It always answers."""
