"""DAPO's soft overlong punishment, subtracted from the reward of responses near their token budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctpo_megatron.data.trajectory import Group

OVERLONG = "overlong_penalty"
"""Name of its component of the reward, and of the metric `reward/<name>`."""


@dataclass(frozen=True)
class OverlongPenalty:
    """0 up to `budget - buffer` tokens, then linearly down to `-penalty` at `budget` (arXiv 2503.14476, equation 13).

    buffer, budget: tokens; budget is `rollout.max_response_tokens`, which counts tool output too.
    """

    buffer: int
    penalty: float
    budget: int

    def of(self, tokens: int) -> float:
        """Return the penalty of a response of `tokens` tokens, from -penalty to 0, to be added to its reward."""
        return max(-self.penalty, min(0.0, (self.budget - self.buffer - tokens) / self.buffer * self.penalty))

    def apply(self, groups: Sequence[Group]) -> None:
        """Add the penalty to the reward of every trajectory that was judged, and to its components.

        With rewards by turn it is added to the last turn, which reached the limit.
        """
        for trajectory in itertools.chain.from_iterable(group.trajectories for group in groups):
            if trajectory.no_verdict is not None:
                continue
            if trajectory.reward is None:
                raise ValueError(f"prompt {trajectory.prompt_id} sample {trajectory.sample_index} has no reward yet")
            shaping = self.of(trajectory.response_tokens)
            trajectory.reward += shaping
            trajectory.reward_components[OVERLONG] = shaping
            if trajectory.turn_rewards is not None:
                trajectory.turn_rewards[-1] += shaping
