"""Rewards of groups: scored as they become complete, reported once a batch."""

from __future__ import annotations

import functools
import logging
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ctpo_megatron.data import Group
from ctpo_megatron.rewards import OVERLONG, OverlongPenalty, RewardPool, ScoreReport, reward_metrics

log = logging.getLogger(__name__)


@functools.cache
def _say_without_turns(data_source: str) -> None:
    log.warning(
        "objective.credit: turn, but the reward function of %r gives no rewards of turns (Reward(turns=[...])): the "
        "last turn of a trajectory earns its whole reward",
        data_source,
    )


class Scorer:
    """Scores groups by reward processes. penalty: for training batches; an evaluation has none. by_turn: whether the
    rewards of turns are trained on (`objective.credit`)."""

    def __init__(self, pool: RewardPool, penalty: OverlongPenalty | None = None, *, by_turn: bool = False) -> None:
        self._pool, self._penalty, self._by_turn = pool, penalty, by_turn

    async def score(self, groups: Sequence[Group]) -> ScoreReport:
        """Give every trajectory its reward, shaping included. Raises as `RewardPool.score`."""
        report = await self._pool.score(groups)
        if self._penalty is not None:
            self._penalty.apply(groups)
        for group in groups if self._by_turn else ():
            if any(t.reward is not None and t.turn_rewards is None for t in group.trajectories):
                _say_without_turns(group.prompt.data_source)
        return report

    def metrics(self, groups: Sequence[Group], reports: Sequence[ScoreReport]) -> dict[str, float]:
        """`reward/*` of scored groups, given the reports of all calls that scored them."""
        metrics = reward_metrics(groups, functools.reduce(operator.add, reports), by_turn=self._by_turn)
        judged = [t for group in groups for t in group.trajectories if t.no_verdict is None]
        if self._penalty is not None and judged:
            metrics[f"reward/{OVERLONG}"] = statistics.fmean(t.reward_components[OVERLONG] for t in judged)
        return metrics


def report_of(record: Mapping[str, Any]) -> ScoreReport:
    """The report of its record in a checkpoint, also of one in which samples without a verdict had the reward 0."""
    fields = dict(record)
    former = {"timeout": fields.pop("timeouts", 0), "exception": fields.pop("failures", 0)}
    fields.setdefault("missing", {cause: count for cause, count in former.items() if count})
    return ScoreReport(**fields)
