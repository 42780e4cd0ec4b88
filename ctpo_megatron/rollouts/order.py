"""Which group begins first: early steps before later ones, and within a step the longest, so that none ends alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.rollouts.request import GroupJob


class GroupOrder:
    """Predicts response lengths, in tokens, by the mean of a prompt's last group. Not checkpointed: it is a guess."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sum = 0.0

    def note(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Take in a complete group."""
        if trajectories:
            mean = statistics.fmean(trajectory.response_tokens for trajectory in trajectories)
            self._sum += mean - self._last.get(prompt.id, 0.0)
            self._last[prompt.id] = mean

    def sorted(self, jobs: Iterable[GroupJob]) -> list[GroupJob]:
        """The jobs in the order in which to begin them; equal ones stay in their order."""
        longest = sorted(jobs, key=lambda job: self.expected(job.prompt), reverse=True)
        return sorted(longest, key=lambda job: job.request.step)

    def expected(self, prompt: Prompt) -> tuple[float, int]:
        """Length of the prompt's last responses, or the mean over all prompts without any; then its own length."""
        usual = self._sum / len(self._last) if self._last else 0.0
        return self._last.get(prompt.id, usual), len(prompt.token_ids)
