"""Trajectories as training sees them: typed arrays, and the counts by which ranks share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.data.records import Trajectory


class TokenArrays(NamedTuple):
    """Per token `[T]`: token_ids int32; response_mask, loss_mask bool; rollout_log_probs float32 (nats)."""

    token_ids: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    loss_mask: NDArray[np.bool_]
    rollout_log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One trajectory of a training step.

    place: its position among the trajectories of the step. name: prompt and sample, for messages. length,
    sampled_tokens, loss_tokens: its tokens, those that the policy sampled, those in the loss. tokens: None on ranks
    that do not train on it.
    """

    place: int
    name: str
    length: int
    sampled_tokens: int
    loss_tokens: int
    tokens: TokenArrays | None

    def __len__(self) -> int:
        return self.length


def token_sequences(trajectories: Iterable[Trajectory]) -> list[TokenSequence]:
    """Every trajectory with its tokens, in order.

    Raises ValueError for one that is empty or starts with a sampled token: the loss predicts tokens from those before.
    """
    return [_sequence(place, trajectory) for place, trajectory in enumerate(trajectories)]


def _sequence(place: int, trajectory: Trajectory) -> TokenSequence:
    name = f"{trajectory.prompt_id}#{trajectory.sample_index}"
    if not len(trajectory):
        raise ValueError(f"trajectory {name} has no tokens")
    if trajectory.response_mask[0]:
        raise ValueError(f"trajectory {name} starts with a sampled token; it needs a prompt")
    tokens = TokenArrays(
        np.array(trajectory.token_ids, np.int32),
        np.array(trajectory.response_mask, np.bool_),
        np.array(trajectory.loss_mask, np.bool_),
        np.array(trajectory.rollout_log_probs, np.float32),
    )
    counts = (int(mask.sum()) for mask in (tokens.response_mask, tokens.loss_mask))
    return TokenSequence(place, name, len(trajectory), *counts, tokens)
