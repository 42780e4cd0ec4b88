"""Whether a run gets worse: its reward or an accuracy far below its start, by more than noise explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctpo_megatron.report.run_data import ACCURACY

REWARD = "reward/mean"
WINDOWS = (1, 5)
"""Steps at the start and at the end whose mean rewards are compared: one shows a collapse at once, five a slow fall."""
_ERRORS = 3.5
"""A fall is one of at least this many standard errors of the difference."""
_SHARE = 0.25
"""And of at least this many standard deviations of the reward of a trajectory, so that small steady losses pass."""
_FEWEST = 30
"""Held-out problems that an evaluation without their number is taken to have."""


@dataclass(frozen=True)
class Trend:
    """A quantity at the start of a run and lately. worse: it has fallen by more than noise explains."""

    label: str
    start: float
    now: float
    worse: bool

    def __str__(self) -> str:
        return f"{self.label} {'fell' if self.worse else 'went'} from {self.start:.3g} to {self.now:.3g}"


@dataclass
class Decline:
    """Compares each step of a run with its start.

    groups: prompts of a step. They are taken as the number of independent rewards, as the samples of a prompt may
    all be alike. The standard error of an accuracy follows from its number of problems.
    """

    groups: int
    _rewards: list[float] = field(default_factory=list)
    _spread: float = 0.0
    _accuracies: dict[str, list[float]] = field(default_factory=dict)
    _problems: dict[str, float] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def add(self, record: Mapping[str, Any]) -> list[str]:
        """Take the metrics of a step, of an evaluation or both. Returns a text for each quantity that has fallen far
        for the first time."""
        if (reward := record.get(REWARD)) is not None:
            self._rewards.append(reward)
            self._spread = max(self._spread, record.get("reward/std") or 0.0)
        for name, value in record.items():
            if value is not None and (match := ACCURACY.fullmatch(name)):
                self._accuracies.setdefault(name, []).append(value)
                problems = record.get(f"val/{match['source']}/problems")
                self._problems[name] = problems or self._problems.get(name, _FEWEST)
        fallen = {name: str(trend) for name, trend in self.trends().items() if trend.worse}
        new = [text for name, text in fallen.items() if name not in self._said]
        self._said |= fallen.keys()
        return new

    def trends(self) -> dict[str, Trend]:
        """Of the reward and of each accuracy with two values at least, by metric."""
        found = {}
        if len(self._rewards) >= 2:
            found[REWARD] = self._reward()
        for name, values in self._accuracies.items():
            if len(values) >= 2 and (match := ACCURACY.fullmatch(name)):
                pooled = min(1.0, max(0.0, (values[0] + values[-1]) / 2))
                spread = math.sqrt(pooled * (1 - pooled))
                worse = _fell(values[0], values[-1], spread, self._problems[name])
                found[name] = Trend(f"accuracy on {match['source']}", values[0], values[-1], worse)
        return found

    def _reward(self) -> Trend:
        """Over the longest window that shows a fall, else over the longest that fits."""
        fitting = [window for window in WINDOWS if len(self._rewards) >= 2 * window]
        trends = []
        for window in reversed(fitting):
            start, now = (sum(part) / window for part in (self._rewards[:window], self._rewards[-window:]))
            worse = _fell(start, now, self._spread, self.groups * window)
            trends.append(Trend("sampled reward", start, now, worse))
        return next((trend for trend in trends if trend.worse), trends[0])


def decline_of(records: Iterable[Mapping[str, Any]], groups: int) -> Decline:
    """Of steps in their order; see `Decline`."""
    decline = Decline(groups)
    for record in records:
        decline.add(record)
    return decline


def _fell(start: float, now: float, spread: float, count: float) -> bool:
    """start, now: means of `count` independent values each, of standard deviation `spread`."""
    error = spread * math.sqrt(2 / count)
    return start - now >= max(_ERRORS * error, _SHARE * spread, math.ulp(abs(start)))
