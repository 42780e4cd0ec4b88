"""Statistics by position of a step's optimizer steps, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctpo_megatron.objective import PolicyObjective, PositionStats, position_metrics, position_stats, skipped_stats
from ctpo_megatron.policy.minibatch import MiniBatch, anchor_of
from ctpo_megatron.policy.parallel import Layout, gather_on_rank_zero
from ctpo_megatron.policy.predictions import Anchor


@dataclass(frozen=True)
class StepPositions:
    """Of the first and the last optimizer step, and of all of them together."""

    first: PositionStats
    last: PositionStats
    whole: PositionStats

    def __add__(self, other: StepPositions) -> StepPositions:
        return StepPositions(self.first + other.first, self.last + other.last, self.whole + other.whole)

    def metrics(self) -> dict[str, float]:
        """See `position_metrics`."""
        return position_metrics(self.last, self.whole)


def gather_positions(
    mini_batches: Sequence[MiniBatch], objective: PolicyObjective | None, anchor: Anchor, layout: Layout
) -> StepPositions | None:
    """Of the latest pass over each mini-batch, usually its update's, on rank zero; None on the others. Collective.

    objective: None for a user's own. Without any mini-batch all are empty.
    """
    each = [_of_mini_batch(mini, objective, anchor, layout) for mini in mini_batches] or [PositionStats.empty()]
    own = StepPositions(each[0], each[-1], sum(each[1:], each[0]))
    parts: list[StepPositions | None] | None = gather_on_rank_zero(
        own if layout.reports or layout.is_rank_zero else None
    )
    if parts is None:
        return None
    first, *others = filter(None, parts)
    return sum(others, first)


def _of_mini_batch(
    mini_batch: MiniBatch, objective: PolicyObjective | None, anchor: Anchor, layout: Layout
) -> PositionStats:
    skipped = [tokens for sequence in mini_batch.skipped if (tokens := sequence.tokens) is not None]  # on rank zero
    found = skipped_stats((tokens["response_mask"], tokens["loss_mask"]) for tokens in skipped)
    for micro in mini_batch.micro_batches if layout.reports else []:
        if micro.log_probs is None:
            raise ValueError("statistics by position need an update first")
        found += position_stats(
            micro.log_probs,
            anchor_of(micro, anchor),
            micro.advantages,
            micro.response_mask,
            micro.loss_mask,
            objective,
            micro.cu_seqlens,
            micro.entropy,
        )
    return found
