"""How long the answers to a prompt are expected to be: which groups are begun first, so that none ends alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory


class LengthPredictor:
    """Mean response lengths, in tokens, of prompts when they were played last. Not in a checkpoint: it is a guess."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sum = 0.0

    def note(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Its group is complete."""
        if trajectories:
            mean = statistics.fmean(trajectory.response_tokens for trajectory in trajectories)
            self._sum += mean - self._last.get(prompt.id, 0.0)
            self._last[prompt.id] = mean

    def expected(self, prompt: Prompt) -> tuple[float, int]:
        """Orders prompts: what its answers had last, or those of all prompts on average; then its own length."""
        usual = self._sum / len(self._last) if self._last else 0.0
        return self._last.get(prompt.id, usual), len(prompt.token_ids)
