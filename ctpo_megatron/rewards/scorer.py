"""Rewards as a run trains on them: by reward processes, with the shaping that is configured, reported once a batch."""

from __future__ import annotations

import functools
import logging
import operator
import statistics
from collections.abc import Sequence

from ctpo_megatron.data import Group
from ctpo_megatron.rewards.overlong import OVERLONG, OverlongPenalty
from ctpo_megatron.rewards.pool import RewardPool, ScoreReport, reward_metrics

log = logging.getLogger(__name__)


class Scorer:
    """Scores groups by reward processes.

    penalty: for training batches; an evaluation has none. by_turn: whether the rewards of turns are trained on
    (`objective.credit`).
    """

    def __init__(self, pool: RewardPool, penalty: OverlongPenalty | None = None, *, by_turn: bool = False) -> None:
        self._pool, self._penalty, self._by_turn = pool, penalty, by_turn
        self._without_turns = set[str]()

    async def score(self, groups: Sequence[Group]) -> ScoreReport:
        """Give every trajectory its reward, shaping included. Raises as `RewardPool.score`."""
        report = await self._pool.score(groups)
        if self._penalty is not None:
            self._penalty.apply(groups)
        for group in groups if self._by_turn else ():
            source = group.prompt.data_source
            lacking = any(t.reward is not None and t.turn_rewards is None for t in group.trajectories)
            if lacking and source not in self._without_turns:
                self._without_turns.add(source)
                log.warning(
                    "objective.credit: turn, but the reward function of %r gives no rewards of turns "
                    "(Reward(turns=[...])): the last turn of a trajectory earns its whole reward",
                    source,
                )
        return report

    def metrics(self, groups: Sequence[Group], reports: Sequence[ScoreReport]) -> dict[str, float]:
        """`reward/*` of scored groups, given the reports of all calls that scored them."""
        metrics = reward_metrics(groups, functools.reduce(operator.add, reports), by_turn=self._by_turn)
        judged = [t for group in groups for t in group.trajectories if t.no_verdict is None]
        if self._penalty is not None and judged:
            metrics[f"reward/{OVERLONG}"] = statistics.fmean(t.reward_components[OVERLONG] for t in judged)
        return metrics
