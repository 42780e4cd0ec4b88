"""Recorded trajectories instead of engines: the same training again, without vLLM, Ray or a sandbox."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import pool_stats
from ctpo_megatron.engines.weights import OffersWeights
from ctpo_megatron.rollouts.ledger import Quarantined
from ctpo_megatron.rollouts.request import Answers, GroupJob, Request


class ReplayError(Exception):
    """The recording is not of what this run asks for; the message names step, prompt and what was recorded."""


class Replay:
    """A `Generator` that answers with what an earlier run recorded.

    recorded: step -> the trajectories of its dump, group by group in sample order.
    max_quarantined: most prompts that the recorded run can have lost (its `rollout.max_quarantined`).
    refills: whether the groups of a step may be asked for in several rounds (`rollout.uniform_groups: refill`).
    """

    def __init__(
        self, recorded: Callable[[int], list[Trajectory]], max_quarantined: int = 0, *, refills: bool = False
    ) -> None:
        self._recorded, self._max_quarantined, self._refills = recorded, max_quarantined, refills
        self._step, self._rest = -1, list[Trajectory]()  # of the step, what no round has asked for yet
        self._queue: list[GroupJob] = []
        self._counts: Counter[str] = Counter()
        self.quarantined: list[Quarantined] = []
        self.lock, self.on_hold = threading.RLock(), False

    def wait_ready(self) -> None:
        """See `Generator`; nothing has to start."""

    def update(self, trainer: OffersWeights, version: int) -> None:
        """See `Generator`; nothing samples with them."""

    @property
    def pending(self) -> Mapping[Any, Prompt]:
        """See `Generator`."""
        return {job.slot: job.prompt for job in self._queue}

    @property
    def in_flight(self) -> int:
        """See `Generator`."""
        return 0

    def add(self, slot: Hashable, prompt: Prompt, request: Request) -> None:
        """See `Generator`."""
        self._queue.append(GroupJob(slot, prompt, request))

    def submit(self) -> None:
        """See `Generator`; `collect` answers everything."""

    def wait(self, timeout_s: float) -> None:
        """See `Generator`; every answer is there."""

    def discard(self, slots: Collection[Hashable]) -> None:
        """See `Generator`."""
        self._queue = [job for job in self._queue if job.slot not in slots]

    def cancel(self) -> None:
        """See `Generator`. The step may be asked for again."""
        if self._queue:
            self._queue, self._step, self._rest = [], -1, []

    def collect(self) -> Answers:
        """The recorded groups of everything that is queued, which must be of these prompts in this order.

        The sampling distribution is the recording's, whatever the request specifies. Where the recorded run replaced a
        prompt, replacements are drawn as that run drew them. Raises ReplayError.
        """
        jobs, self._queue = self._queue, []
        if not jobs:
            return Answers()
        request, prompts = jobs[0].request, [job.prompt for job in jobs]
        recorded = self._take(request, len(jobs))
        if request.replacements is not None:
            prompts = self._replace(prompts, recorded, request.step, request.replacements)
        groups = [
            (job.slot, _group(request.step, index, prompts[index], recorded[index])) for index, job in enumerate(jobs)
        ]
        return Answers(groups)

    def _take(self, request: Request, groups: int) -> list[list[Trajectory]]:
        """The next recorded groups of the step."""
        step, samples = request.step, request.samples
        first = not self._refills or step != self._step
        if first:
            self._step, self._rest = step, self._recorded(step)
        count = groups * samples
        if len(self._rest) < count or (len(self._rest) > count and not self._refills):
            there = "were recorded" if first else "are left of the recording"
            raise ReplayError(
                f"step {step}: {len(self._rest)} trajectories {there}, {groups} prompts x {samples} samples are "
                "needed: set rollout.prompts_per_step and rollout.samples_per_prompt as in the recorded run"
            )
        trajectories, self._rest = self._rest[:count], self._rest[count:]
        return [trajectories[start : start + samples] for start in range(0, len(trajectories), samples)]

    def _replace(
        self,
        prompts: Sequence[Prompt],
        recorded: Sequence[list[Trajectory]],
        step: int,
        replacements: Iterator[Prompt],
    ) -> list[Prompt]:
        """The prompts that were sampled instead of `prompts`; those that `replacements` do not explain stay.

        The last prompt that a step draws is never lost, or another would have been drawn. So a replay that draws until
        every recorded prompt was met has drawn as many as the recorded run.
        """
        sampled = list(prompts)
        missing = [index for index, prompt in enumerate(prompts) if prompt.id != recorded[index][0].prompt_id]
        lost = {prompts[index].id for index in missing}
        # The endless stream may give a prompt that is already lost again, but at most twice in a row of such prompts.
        for _ in range(len(missing) + 2 * self._max_quarantined):
            if not missing:
                break
            prompt = next(replacements)
            index = next((index for index in missing if recorded[index][0].prompt_id == prompt.id), None)
            if index is None:
                lost.add(prompt.id)
            else:
                sampled[index] = prompt
                missing.remove(index)
        lost -= {record.prompt_id for record in self.quarantined}
        if missing or len(self.quarantined) + len(lost) > self._max_quarantined:
            return list(prompts)  # another recording: the first prompt that differs is reported
        self.quarantined += [Quarantined(name, step, "lost in the recorded run") for name in sorted(lost)]
        self._counts["quarantined"] += len(lost)
        return sampled

    def stats(self) -> dict[str, float]:
        """The names that `EnginePool.stats` has; all but `quarantined` are 0.

        Comes after the last call of a step: raises ReplayError when more groups of it were recorded.
        """
        if self._rest:
            raise ReplayError(
                f"step {self._step}: {len(self._rest)} more trajectories were recorded than this run asks for: refills "
                "follow from the rewards, so give reward.* and rollout.max_refills as in the recorded run"
            )
        counts, self._counts = self._counts, Counter()
        return pool_stats(counts)


def _group(step: int, index: int, prompt: Prompt, trajectories: list[Trajectory]) -> Group:
    for sample, trajectory in enumerate(trajectories):
        where = f"step {step}, prompt {index + 1} of the batch, sample {sample}"
        if (trajectory.prompt_id, trajectory.sample_index) != (prompt.id, sample):
            raise ReplayError(
                f"{where}: the run draws prompt {prompt.id!r}, the recording has prompt {trajectory.prompt_id!r} "
                f"(sample {trajectory.sample_index}): give data.train, data.shuffle and run.seed as in the recorded run"
            )
        if trajectory.token_ids[: len(prompt.token_ids)] != list(prompt.token_ids):
            raise ReplayError(
                f"{where}: prompt {prompt.id!r} was recorded with other tokens than this tokenizer and chat template "
                "give: use the recorded run's model.path, chat template, rollout.tool_parser and data.system_prompt"
            )
    return Group(prompt, trajectories)
