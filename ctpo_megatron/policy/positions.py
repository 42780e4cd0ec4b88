"""Statistics by position of a step's optimizer steps, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import (
    PolicyObjective,
    PositionStats,
    SamplerTokens,
    position_metrics,
    position_stats,
    skipped_stats,
)
from ctpo_megatron.policy.minibatch import MiniBatch, anchor_of
from ctpo_megatron.policy.parallel import Layout, gather_on_rank_zero
from ctpo_megatron.policy.predictions import Anchor


@dataclass(frozen=True)
class StepPositions:
    """Of the first and the last optimizer step, and of all of them together.

    updated: of the last, but of trajectories that its update skips the numbers of tokens alone, as in `whole`. On steps
    of `tracking.dump_every` a pass of their own runs over the skipped trajectories of `first` and `last`.
    """

    first: PositionStats
    last: PositionStats
    whole: PositionStats
    updated: PositionStats

    def __add__(self, other: StepPositions) -> StepPositions:
        return StepPositions(
            self.first + other.first, self.last + other.last, self.whole + other.whole, self.updated + other.updated
        )

    def metrics(self) -> dict[str, float]:
        """See `position_metrics`: of the same tokens in every step."""
        return position_metrics(self.updated, self.whole)


def gather_positions(
    mini_batches: Sequence[MiniBatch], objective: PolicyObjective | None, anchor: Anchor, layout: Layout
) -> StepPositions | None:
    """Of the latest pass over each mini-batch, usually its update's, on rank zero; None on the others. Collective.

    objective: None for a user's own. Without any mini-batch all are empty.
    """

    def stats_of(micro_batches: Sequence[PackedBatch]) -> PositionStats:
        each = [_of_pass(micro, objective, anchor) for micro in micro_batches if layout.reports]
        return sum(each, PositionStats.empty())

    updates = [stats_of(mini.micro_batches) for mini in mini_batches] or [PositionStats.empty()]
    counts = [_counted(mini) for mini in mini_batches] or [PositionStats.empty()]
    counted = [update + count for update, count in zip(updates, counts, strict=True)]
    first, last = (
        updates[place] + stats_of(mini_batches[place].skipped_micro_batches)
        if mini_batches and mini_batches[place].skipped_micro_batches
        else counted[place]
        for place in (0, -1)
    )
    own = StepPositions(first, last, sum(counted, PositionStats.empty()), counted[-1])
    parts: list[StepPositions | None] | None = gather_on_rank_zero(
        own if layout.reports or layout.is_rank_zero else None
    )
    if parts is None:
        return None
    one, *others = filter(None, parts)
    return sum(others, one)


def _counted(mini_batch: MiniBatch) -> PositionStats:
    """Numbers of tokens of the skipped trajectories, on rank zero, which alone has them all."""
    skipped = [tokens for sequence in mini_batch.skipped if (tokens := sequence.tokens) is not None]
    return skipped_stats((tokens["response_mask"], tokens["loss_mask"]) for tokens in skipped)


def _of_pass(micro: PackedBatch, objective: PolicyObjective | None, anchor: Anchor) -> PositionStats:
    if micro.log_probs is None:
        raise ValueError("statistics by position need an update first")
    return position_stats(
        micro.log_probs,
        anchor_of(micro, anchor),
        micro.advantages,
        micro.response_mask,
        micro.loss_mask,
        objective,
        micro.cu_seqlens,
        micro.entropy,
        micro.turn,
        SamplerTokens(micro.rollout_log_probs, micro.weight_version, micro.version, micro.old_log_probs),
    )
