"""95 % intervals of mean scores and of their differences, over problems and over seeds. docs/compare.md explains them.

Scores are tables `[S, P]`, float64: seeds by problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 10_000
_DRAWS = 50_000
"""Of the spread over seeds alone, which are quicker: 2 % of a width are left to chance."""
_AT_ONCE = 1 << 22
"""Problems drawn at once, which bounds the memory."""

Ends = tuple[float, float]
SignedTables = Sequence["tuple[float, NDArray[Any]]"]
"""Tables of the same problems, each with its factor in the sum that the interval is of."""


def student_interval(values: Sequence[float], least: float = 0.0) -> Ends:
    """Return Student's t interval of the mean of independent values, two or more. least: of the variance of a value."""
    from scipy.special import stdtrit

    count, mean = len(values), math.fsum(values) / len(values)
    reach = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * math.sqrt(max(variance(values), least) / count)
    return mean - reach, mean + reach


def unanimous_interval(value: float, bounds: Ends, count: int) -> Ends:
    """Interval of a mean between `bounds` where `count` values are equal: as if each had been one throw, and none had
    been unlike (Clopper and Pearson, 1934)."""
    reach = 1 - ((1 - LEVEL) / 2) ** (1 / count)
    return value - reach * (value - bounds[0]), value + reach * (bounds[1] - value)


def seeds_interval(sides: Sequence[Sequence[Sequence[float]]], bounds: Ends | None = None, least: float = 0.0) -> Ends:
    """Interval of the mean over seeds, or of the difference of the means of two sides whose seeds are not paired.

    sides: for each seed, two or more, the scores (or differences) of problems of its own. bounds: smallest and largest
    value possible. Of one side Student's t, and of two the generalized solution of Behrens and Fisher, with one
    exception: the means of few seeds may agree by chance, so their variance is at least what the problems explain, and
    at least `least`.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    value, sign, spread = 0.0, 1.0, np.zeros(_DRAWS)
    for side in sides:
        means = [math.fsum(scores) / len(scores) for scores in side]
        of_problems = math.fsum(variance(scores) / len(scores) for scores in side if len(scores) > 1) / len(side)
        may_be = (len(side) - 1) * variance(means) / generator.chisquare(len(side) - 1, _DRAWS)
        spread += np.maximum(may_be, max(of_problems, least)) / len(side)
        value += sign * math.fsum(means) / len(means)
        sign = -1.0
    reach = float(np.quantile(np.abs(np.sqrt(spread) * generator.standard_normal(_DRAWS)), LEVEL))
    return _possible((value - reach, value + reach), bounds, min(len(scores) for side in sides for scores in side))


def variance(values: Sequence[float]) -> float:
    """Return the unbiased variance of values, two or more."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def hierarchical_interval(
    blocks: Sequence[SignedTables], bounds: Ends | None = None, resamples: int = RESAMPLES
) -> Ends:
    """Bootstrap interval of a weighted sum of mean scores, over problems, and over seeds where tables have several.

    Problems are resampled. Seeds are too few for that: the part of each table that only seeds explain is drawn from
    normal theory. blocks: problems of different blocks are drawn separately; two problems or more. bounds: smallest
    and largest value possible. The same tables give the same interval.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    drawn = np.zeros(resamples)
    for block in blocks:
        by_problem = sum(factor * table.mean(0) for factor, table in block)
        drawn += _means_of_resamples(np.asarray(by_problem), resamples, generator)
        for factor, table in block:
            if len(table) > 1:
                drawn += factor * _seed_part(table, resamples, generator)
    problems = min(block[0][1].shape[1] for block in blocks)
    tail = _tail(problems)
    low, high = (float(end) for end in np.quantile(drawn, [tail, 1 - tail]))
    return _possible((low, high), bounds, problems)


def _means_of_resamples(values: NDArray[Any], resamples: int, generator: Generator) -> NDArray[Any]:
    """`[resamples]`: means of as many values, drawn with replacement."""
    import numpy as np

    count = len(values)
    size = max(1, _AT_ONCE // count)
    rounds = (min(size, resamples - done) for done in range(0, resamples, size))
    return np.concatenate([values[generator.integers(count, size=(n, count))].mean(1) for n in rounds])


def _seed_part(table: NDArray[Any], resamples: int, generator: Generator) -> NDArray[Any]:
    """`[resamples]`: draws of how far these seeds are from the mean of all seeds, whatever the problems.

    The mean squares of a two-way table estimate P var(seed) + var(rest) and var(rest). The first, divided by
    chi2 / (S - 1), is a draw of what it may be the estimate of. Less the second, it is the part of the seeds
    (generalized interval of a variance component; Weerahandi, 1993).
    """
    import numpy as np

    seeds, problems = table.shape
    means = table.mean(1, keepdims=True)
    rest = table - means - table.mean(0, keepdims=True) + table.mean()
    of_seeds = problems * float(means.var(ddof=1))
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (problems - 1))
    may_be = of_seeds * (seeds - 1) / generator.chisquare(seeds - 1, resamples)
    variance = np.maximum(may_be - of_rest, 0.0) / (seeds * problems)
    return np.asarray(np.sqrt(variance) * generator.standard_normal(resamples))


def _tail(problems: int) -> float:
    """Share of the draws on either side of the interval: a little less than 2.5 %, since a bootstrap of few values is
    too narrow (expanded percentiles; Hesterberg, 2015, arXiv 1411.5279)."""
    from scipy.special import ndtr, stdtrit

    quantile = stdtrit(problems - 1, (1 + LEVEL) / 2)
    return float(ndtr(-math.sqrt(problems / (problems - 1)) * quantile))


def _possible(ends: Ends, bounds: Ends | None, problems: int) -> Ends:
    """An interval cut to `bounds`; without width, where no problem differs from another, `unanimous_interval`."""
    if bounds is None:
        return ends
    low, high = ends
    if low == high:
        return unanimous_interval(low, bounds, problems)
    return max(low, bounds[0]), min(high, bounds[1])
