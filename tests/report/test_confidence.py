"""95 % intervals: they hold what they promise in simulated comparisons, and equal what theory or scipy gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import Accuracies, covered, own_problems
from ctpo_megatron.report import confidence
from ctpo_megatron.report.confidence import hierarchical_interval, seeds_interval

RUNS, RESAMPLES = 500, 1000


def one_of(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The first case of a kind, and the others as slow tests."""
    first, *others = cases
    return [pytest.param(*first), *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


@pytest.mark.parametrize(
    ("case", "covers", "apart_at_most"),
    [
        # Without any effect of seeds, one seed is enough.
        *one_of(
            (case, (0.93, 0.97), 0.07)
            for case in (Accuracies(1, 30, 1, 0, 0.5), Accuracies(1, 30, 8, 0, 0), Accuracies(1, 100, 1, 0, 0))
        ),
        # Where the spread of the seeds decides.
        *one_of(
            (Accuracies(seeds, 30, 8, 0.5, effect), (0.93, 0.98), 0.06)
            for seeds, effect in ((3, 0.0), (5, 0.3), (10, 0.0))
        ),
        # Two seeds may differ by chance less than seeds do, and where seeds have no effect, that is not known.
        *one_of((Accuracies(seeds, 30, 1, 0, 0), (0.95, 1.0), 0.05) for seeds in (2, 5)),
        pytest.param(Accuracies(2, 30, 8, 0.5, 0.3), (0.95, 1.0), 0.05, marks=pytest.mark.slow),
        *one_of(
            (Accuracies(seeds, 30, 8, 0.5, effect, paired=False), (0.95, 1.0), 0.05)
            for seeds, effect in ((3, 0.3), (5, 0.0))
        ),
    ],
)
def test_intervals_cover_other_seeds(case: Accuracies, covers: tuple[float, float], apart_at_most: float) -> None:
    hits, apart, _ = covered(case, RUNS, RESAMPLES)
    assert covers[0] <= hits <= covers[1]
    assert case.effect or (0.03 if case.seeds == 1 else 0.0) <= apart <= apart_at_most


def test_the_same_tables_give_the_same_interval() -> None:
    table = np.random.default_rng(1).random((3, 40))
    assert hierarchical_interval([[(1.0, table)]]) == hierarchical_interval([[(1.0, table.copy())]])


def test_pairs_are_narrower_than_groups_apart() -> None:
    generator = np.random.default_rng(2)
    easy = generator.random(200)
    first, second = (np.array([(generator.random(200) < easy)], float) for _ in range(2))
    pair = hierarchical_interval([[(1.0, first), (-1.0, second)]])
    apart = hierarchical_interval([[(1.0, first)], [(-1.0, second)]])
    assert np.ptp(pair) < 0.9 * np.ptp(apart)


def test_one_seed_equals_students_t_over_many_problems() -> None:
    table = np.random.default_rng(3).normal(0.5, 0.1, (1, 2000))
    expected = stats.t.interval(0.95, 1999, table.mean(), stats.sem(table[0]))
    assert hierarchical_interval([[(1.0, table)]]) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("right", [0, 30])
def test_equal_answers_are_no_proof(right: int) -> None:
    """Clopper and Pearson's interval; where answers differ, the bounds are kept."""
    found = stats.binomtest(right, 30).proportion_ci(0.95)
    table = np.full((1, 30), right / 30)
    assert hierarchical_interval([[(1.0, table)]], (0.0, 1.0)) == pytest.approx((found.low, found.high))
    low, high = hierarchical_interval([[(1.0, np.array([[1.0] * 29 + [0.0]] * 2))]], (0.0, 1.0))
    assert 0 <= low < 29 / 30 <= high <= 1


def test_many_problems_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(4).random((1, 50))
    whole = hierarchical_interval([[(1.0, table)]])
    monkeypatch.setattr(confidence, "_AT_ONCE", 1000)
    assert hierarchical_interval([[(1.0, table)]]) == pytest.approx(whole, abs=0.01)


def seed_of(mean: float, problems: int = 4000) -> list[float]:
    """Scores of so many problems that their mean has next to no error."""
    return [1.0] * round(mean * problems) + [0.0] * round((1 - mean) * problems)


def test_seeds_with_problems_of_their_own_have_students_interval() -> None:
    """Where the spread over seeds is far above the error of their means."""
    means, others = [0.3, 0.6, 0.4, 0.7, 0.5], [0.2, 0.5, 0.35, 0.6, 0.45]
    found = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    one = seeds_interval([[seed_of(mean) for mean in means]])
    assert one == pytest.approx((found.low, found.high), abs=0.005)
    two = seeds_interval([[seed_of(mean) for mean in side] for side in (means, others)])
    generator = np.random.default_rng(7)
    first, second = (stats.sem(side) * generator.standard_t(4, 200_000) for side in (means, others))
    expected = np.quantile(np.abs(first - second), 0.95)  # Behrens and Fisher
    assert np.ptp(two) / 2 == pytest.approx(expected, rel=0.02)
    assert sum(two) / 2 == pytest.approx(np.mean(means) - np.mean(others))


def test_seeds_that_agree_by_chance_leave_what_their_problems_leave() -> None:
    """Two means of 0.9 over 100 problems: their own spread is 0, that of the problems 0.03."""
    low, high = seeds_interval([[seed_of(0.9, 100)] * 2], (0.0, 1.0))
    error = np.std(seed_of(0.9, 100), ddof=1) / 10 / np.sqrt(2)
    assert (low, high) == pytest.approx((0.9 - 1.96 * error, 0.9 + 1.96 * error), abs=0.001)
    assert seeds_interval([[seed_of(0.98, 100), seed_of(0.9, 100)]], (0.0, 1.0))[1] == 1.0
    assert seeds_interval([[[1.0] * 30] * 2], (0.0, 1.0)) == pytest.approx((0.025 ** (1 / 30), 1.0))
    low, high = seeds_interval([[seed_of(0.9, 100)] * 2] * 2, (-1.0, 1.0))
    assert (low, high) == pytest.approx((-1.96 * np.sqrt(2) * error, 1.96 * np.sqrt(2) * error), abs=0.001)


@pytest.mark.parametrize("seeds", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chance", [0.6, 0.99])
def test_seeds_with_problems_of_their_own_cover_other_seeds(chance: float, seeds: int) -> None:
    """Near the ceiling the means of two seeds are often equal: Student's interval covered 83 % there."""
    assert own_problems(chance, seeds, 250) > 0.94
