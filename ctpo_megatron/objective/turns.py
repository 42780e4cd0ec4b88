"""Ends of turns in a flat batch: the tokens at which the ratio of a turn's reward is taken (`turn_ratio: turn-end`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_megatron.objective.sequences import SequenceBounds


@dataclass(frozen=True)
class TurnEnds:
    """Where the turns of a flat batch end; all `[N]`, meaningful where the policy sampled the token.

    last: bool, the last model token of its turn. end: int64, the token at which its turn ends. following: int64, the
    next model token of its sequence, N where there is none.
    """

    last: Tensor
    end: Tensor
    following: Tensor
    layout: SequenceBounds

    @classmethod
    def of(cls, turn: Tensor, model: Tensor, layout: SequenceBounds) -> TurnEnds:
        """turn: the turn of each token, an integer `[N]`. model: bool `[N]`, the policy sampled the token."""
        n = model.numel()
        following = _places(model)[model.cumsum(0)]
        sequence = torch.cat([layout.sequence_id, layout.sequence_id.new_full((1,), -1)])
        following = torch.where(sequence[following] == layout.sequence_id, following, n)
        number = torch.cat([turn, turn.new_full((1,), -1)])
        last = model & (number[following] != turn)
        end = _places(last)[last.cumsum(0) - last.to(torch.int64)]
        return cls(last, end.clamp(max=n - 1), following, layout)

    def gain(self, advantage: Tensor) -> Tensor:
        """What a turn has on its own: its advantage minus the next turn's, `[N]`, from advantages `[N]`.

        Advantages are of returns to go, so that these add up to the advantage over a turn and all later ones.
        """
        return advantage - torch.cat([advantage, advantage.new_zeros(1)])[self.following]

    def at_end(self, values: Tensor) -> Tensor:
        """`[N]` -> `[N]`: every token gets the value at the end of its turn."""
        return values[self.end]

    def sum_from_here(self, values: Tensor) -> Tensor:
        """The sum of `values` `[N]` over the ends of the token's turn and of all later ones, float64 `[N]`.

        Pairs at distances of 1, 2, 4, ... are added, so the bits do not depend on what else is in the batch.
        """
        total = torch.where(self.last, values.double(), 0.0)
        sequence, n, distance = self.layout.sequence_id, values.numel(), 1
        while distance < n:
            together = sequence[distance:] == sequence[:-distance]
            later = torch.where(together, total[distance:], 0.0)
            total = total + torch.cat([later, later.new_zeros(distance)])
            distance *= 2
        return total


def _places(mask: Tensor) -> Tensor:
    """int64 `[N + 1]`: the index of the k-th token of a bool mask `[N]`, from 0; N where there are fewer."""
    n = mask.numel()
    rank = torch.where(mask, mask.cumsum(0) - 1, n)
    index = torch.arange(n + 1, device=mask.device)
    found = torch.full_like(index, n).scatter(0, rank, index[:-1])
    return torch.where(index < n, found, n)  # the last place received all tokens that are not in the mask
