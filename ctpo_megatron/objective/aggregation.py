"""From token losses to one number, with denominators of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.ratios import SequenceBounds


@dataclass(frozen=True)
class Denominators:
    """Counts of one optimizer step over all micro-batches and data-parallel ranks, taken before the step is split.

    Every micro-batch loss is divided by these counts. So the sum of the micro-batch losses (and of their gradients) is
    the loss of the step for any split. A framework that averages gradients over ranks must undo that average.

    sequences: sequences, those without a loss token and empty ones included.
    trained_sequences: sequences with at least one loss token.
    tokens: loss tokens.

    Add them up with `+` (or `sum(parts, Denominators())`) over micro-batches, and over ranks by summing `as_list()`.
    """

    sequences: int = 0
    trained_sequences: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, loss_mask: Tensor, cu_seqlens: Tensor | None = None) -> Denominators:
        """Counts of a batch: loss_mask `[B, T]`, or `[N]` with cu_seqlens `[B + 1]`. Reads the counts back to the host.

        `loss_mask` must not exceed the response mask of the loss. Padding rows count as sequences: leave them out.
        """
        layout = SequenceBounds.of(loss_mask, cu_seqlens)
        return cls(*counts(layout.mask(loss_mask, "loss_mask"), layout).tolist())

    @classmethod
    def of_counts(cls, loss_tokens: Iterable[int]) -> Denominators:
        """Counts of sequences, each given by its number of loss tokens."""
        tokens = list(loss_tokens)
        return cls(len(tokens), sum(1 for n in tokens if n), sum(tokens))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(*(a + b for a, b in zip(self.as_list(), other.as_list(), strict=True)))

    def as_list(self) -> list[int]:
        """`[sequences, trained_sequences, tokens]`: sum this over ranks, then `Denominators(*summed)`."""
        return [self.sequences, self.trained_sequences, self.tokens]


def counts(loss_mask: Tensor, layout: SequenceBounds) -> Tensor:
    """int64 `[3]` on the device: sequences, sequences with a loss token, loss tokens; `loss_mask` is bool `[N]`."""
    lengths = layout.total(loss_mask.to(torch.int64))
    sequences = torch.full_like(lengths.sum(), layout.sequences)
    return torch.stack([sequences, (lengths > 0).sum(), lengths.sum()])


def token_scale(
    loss_mask: Tensor, layout: SequenceBounds, objective: PolicyObjective, denominators: Denominators | None
) -> Tensor:
    """Factor of each token's loss, float64 `[N]`, so that loss = sum_t scale_t l_t. With N sequences in the step:

        seq-mean-token-mean   1 / (N |l_i|)      mean over sequences of the mean over a sequence's loss tokens
        token-mean            1 / sum_i |l_i|    mean over the loss tokens of the step
        seq-mean-token-sum    1 / (N L)          mean over sequences of the sum over tokens, over L

    L is `loss_scale_factor`. N counts every sequence, or only those with a loss token (`count_masked_sequences`).
    `denominators` None: this batch is the whole step. An empty denominator counts as 1, and the loss is then 0.
    """
    of_step: Sequence[int | Tensor]
    if denominators is None:
        of_step = counts(loss_mask, layout).clamp(min=1).unbind()
    else:
        of_step = [max(count, 1) for count in denominators.as_list()]
    sequences, trained, tokens = of_step
    # Created on the device: copying a host tensor there would synchronise.
    one = torch.ones((), dtype=torch.float64, device=loss_mask.device)
    if objective.loss_agg_mode == "token-mean":
        return (one / tokens).expand(loss_mask.shape)
    n = sequences if objective.count_masked_sequences else trained
    if objective.loss_agg_mode == "seq-mean-token-sum":
        return (one / (n * objective.loss_scale_factor)).expand(loss_mask.shape)
    lengths = layout.total(loss_mask.to(torch.int64)).clamp(min=1)
    return layout.to_tokens(one / (n * lengths))
