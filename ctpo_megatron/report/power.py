"""The difference that a comparison could have seen: with it, 80 % of such comparisons would have found one.

The variance of an estimate is a sum of independent parts, each estimated with some degrees of freedom; Welch and
Satterthwaite make one part of them. A variance of few degrees is usually too small. Its median is taken out, so that
the answer is too large as often as too small. `benchmarks/results/intervals.md` says how often such differences are
seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctpo_megatron.report.confidence import LEVEL, Ends, SignedTables, variance

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

POWER = 0.8
VariancePart = tuple[float, float]
"""Variance of a mean, and the degrees of freedom that it was estimated with."""


def visible_difference(parts: Sequence[VariancePart], interval: Ends) -> float:
    """Return the true difference that a two-sided test sees in 80 % of comparisons with this spread.

    interval: of the estimate. It may be wider than Student's with these parts, and then the difference grows with it.
    """
    from scipy.special import chdtri, nctdtrinc, stdtrit

    half = (interval[1] - interval[0]) / 2
    total = math.fsum(part for part, _ in parts)
    if total == 0:
        return half
    freedom = max(1.0, total**2 / math.fsum(part**2 / degrees for part, degrees in parts if part))
    median = float(chdtri(freedom, 0.5)) / freedom
    quantile = float(stdtrit(freedom, (1 + LEVEL) / 2))
    away = float(nctdtrinc(freedom, 1 - POWER, quantile))
    return max(half / quantile, math.sqrt(total)) * away / math.sqrt(median)


def seed_parts(sides: Sequence[Sequence[Sequence[float]]]) -> list[VariancePart]:
    """Return the parts of `seeds_interval`: one for each side."""
    return [_seed_part([math.fsum(scores) / len(scores) for scores in side], side) for side in sides]


def _seed_part(means: Sequence[float], side: Sequence[Sequence[float]]) -> VariancePart:
    of_problems = math.fsum(variance(scores) / len(scores) for scores in side if len(scores) > 1) / len(side)
    return max(variance(means), of_problems) / len(side), len(side) - 1


def table_parts(blocks: Sequence[SignedTables]) -> list[VariancePart]:
    """Return the parts of `hierarchical_interval`: of the problems of each block, and of the seeds of each table."""
    parts: list[VariancePart] = []
    for block in blocks:
        by_problem: NDArray[Any] = sum(factor * table.mean(0) for factor, table in block)
        parts.append((float(by_problem.var(ddof=1)) / len(by_problem), len(by_problem) - 1))
        parts += [_table_part(factor, table) for factor, table in block if len(table) > 1]
    return parts


def _table_part(factor: float, table: NDArray[Any]) -> VariancePart:
    seeds = len(table)
    return factor**2 * float(table.mean(1).var(ddof=1)) / seeds, seeds - 1
