"""The entropy bonus of the sweep: its contribution to each row's gradient and to the loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import context_parallel
from ctpo_kernels.loss import loss_implementation
from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.rows_torch import EntropyGradient
from ctpo_kernels.spec import LossSpec


class EntropyBonus:
    """-coefficient times the entropy of the loss tokens, aggregated like the loss and filled in chunk by chunk.

    entropy: `[M]` nats, of the rows processed so far.
    """

    def __init__(
        self,
        batch: PackedTokens,
        spec: LossSpec,
        inverse: float | Tensor,
        cp_group: dist.ProcessGroup | None,
        coefficient: float,
    ) -> None:
        self.entropy = torch.zeros_like(batch.log_probs)
        self._g: Tensor | None = None
        if coefficient:
            share = batch.trained.to(torch.float64) * inverse
            if spec.per_sequence:
                share = share / _loss_tokens_of_own_sequence(batch, cp_group)
            self._g = (-coefficient * share).to(batch.log_probs.dtype)

    def step(self, start: int, end: int, entropy: Tensor) -> EntropyGradient | None:
        """Store the entropies of a chunk; returns its part of the gradient."""
        self.entropy[start:end] = entropy
        return self.gradient(start, end)

    def gradient(self, start: int, end: int) -> EntropyGradient | None:
        """Return the gradient of a chunk whose entropies are stored."""
        return None if self._g is None else EntropyGradient(self.entropy[start:end], self._g[start:end])

    def subtracted_from(self, loss: Tensor) -> Tensor:
        """Return the float64 loss with the bonus, or the loss unchanged when the coefficient is 0."""
        if self._g is None:
            return loss
        return loss + (torch.where(self._g == 0, 0.0, self.entropy).double() * self._g).sum()


def _loss_tokens_of_own_sequence(batch: PackedTokens, cp_group: dist.ProcessGroup | None) -> Tensor:
    """float64 `[M]`: loss tokens of each token's whole sequence, at least 1. Collective with `cp_group`."""
    totals = loss_implementation(batch.log_probs).segment_totals(batch)
    if cp_group is not None:
        _, totals = context_parallel.zigzag(totals, cp_group)
    counts = torch.cat([totals[:, 3], totals.new_ones(1)]).clamp(min=1)
    return counts[batch.segment].double()


def rows_with_gradient(g: Tensor, extra: EntropyGradient | None) -> Tensor:
    """Nonzero where a row has a gradient."""
    return g if extra is None else torch.where(extra.g != 0, 1.0, g)
