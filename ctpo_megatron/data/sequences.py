"""Trajectories for training: typed arrays, and the counts by which they are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.data.trajectory import Trajectory


class TokenArrays(NamedTuple):
    """Per token `[T]`: token_ids int32; response_mask, loss_mask, current bool; rollout_log_probs float32 (nats).

    current: sampled by the trainer's current weights, so that the trainer's log-prob must agree.
    """

    token_ids: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    loss_mask: NDArray[np.bool_]
    current: NDArray[np.bool_]
    rollout_log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One trajectory of a training step.

    place: its index among the trajectories of the step. name: prompt and sample, for messages. length, sampled_tokens,
    loss_tokens: number of all tokens, of sampled tokens and of loss tokens. tokens: None on ranks that do not train on
    it.
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
    """The tokens of every trajectory, in order. version: of the current weights; None: any version counts as current.

    Raises ValueError for a trajectory that is empty or starts with a sampled token, which nothing would predict.
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
