"""Trajectories as training sees them: typed arrays, and the counts by which ranks share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.data.trajectory import Trajectory


class TokenArrays(NamedTuple):
    """Per token `[T]`: token_ids int32; response_mask, loss_mask, current bool; rollout_log_probs float32 (nats).

    current: sampled by the weights that the step starts from, so that the trainer's log-prob has to be the same.
    """

    token_ids: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    loss_mask: NDArray[np.bool_]
    current: NDArray[np.bool_]
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


def token_sequences(trajectories: Iterable[Trajectory], version: int | None = None) -> list[TokenSequence]:
    """Every trajectory with its tokens, in order. version: of the weights that the step starts from; None: of all.

    Raises ValueError for one that is empty or starts with a sampled token: the loss predicts tokens from those before.
    """
    return [_sequence(place, trajectory, version) for place, trajectory in enumerate(trajectories)]


def _sequence(place: int, trajectory: Trajectory, version: int | None) -> TokenSequence:
    name = f"{trajectory.prompt_id}#{trajectory.sample_index}"
    if not len(trajectory):
        raise ValueError(f"trajectory {name} has no tokens")
    if trajectory.response_mask[0]:
        raise ValueError(f"trajectory {name} starts with a sampled token; it needs a prompt")
    sampled_mask = np.array(trajectory.response_mask, np.bool_)
    tokens = TokenArrays(
        np.array(trajectory.token_ids, np.int32),
        sampled_mask,
        np.array(trajectory.loss_mask, np.bool_),
        sampled_mask if version is None else np.array(trajectory.weight_version, np.int64) == version,
        np.array(trajectory.rollout_log_probs, np.float32),
    )
    sampled, loss = (int(mask.sum()) for mask in (tokens.response_mask, tokens.loss_mask))
    return TokenSequence(place, name, len(trajectory), sampled, loss, tokens)
