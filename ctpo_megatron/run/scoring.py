"""Rewards of a batch that is sampled in one or more rounds: scored as it comes, reported once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import reduce
from operator import add

from ctpo_megatron.data import Group
from ctpo_megatron.rewards import OVERLONG, OverlongPenalty, RewardPool, ScoreReport
from ctpo_megatron.tracking import reward_metrics


class Scoring:
    """What a `Collector` scores with. penalty: of training batches; an evaluation has none."""

    def __init__(self, pool: RewardPool, penalty: OverlongPenalty | None = None) -> None:
        self._pool, self._penalty = pool, penalty

    def score(self, groups: Sequence[Group]) -> ScoreReport:
        """Give every trajectory its reward, shaping included."""
        report = self._pool.score(groups)
        if self._penalty is not None:
            self._penalty.apply(groups)
        return report

    def metrics(self, groups: Sequence[Group], reports: Sequence[ScoreReport]) -> dict[str, float]:
        """`reward/*` of scored groups, given the reports of all calls that scored them."""
        metrics = reward_metrics(groups, reduce(add, reports))
        if self._penalty is not None:
            shaping = [t.reward_components[OVERLONG] for group in groups for t in group.trajectories]
            metrics[f"reward/{OVERLONG}"] = statistics.fmean(shaping)
        return metrics
