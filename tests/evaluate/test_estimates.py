"""Estimates against brute force: every subset, every vote, and resamples drawn one by one."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from ctpo_megatron.evaluate.samples import bootstrap, expected_best, majority


@pytest.mark.parametrize("scores", [[0, 1, 0, 0, 1], [0, 0, 0], [1, 1], [0.25, 1.0, 0.5, 0.25, 0.0, 1.0]])
def test_expected_best_is_the_mean_over_all_subsets(scores: list[float]) -> None:
    for draws in range(1, len(scores) + 1):
        subsets = itertools.combinations(scores, draws)
        assert expected_best(scores, draws) == pytest.approx(statistics.fmean(map(max, subsets)), abs=1e-12)


def test_expected_best_of_many_samples_is_exact() -> None:
    """Of 512 samples with one right, pass@j is j / 512; the usual product form would lose digits."""
    scores = [1.0] + [0.0] * 511
    assert all(expected_best(scores, draws) == pytest.approx(draws / 512, rel=1e-12) for draws in range(1, 513))
    for draws in (0, 513):
        with pytest.raises(ValueError, match="512 scores"):
            expected_best(scores, draws)


def test_pass_at_j_is_unbiased() -> None:
    """Over all outcomes of 5 samples that are right with probability p, its mean is 1 - (1 - p)^j."""
    p = 0.3
    for draws in range(1, 6):
        outcomes = itertools.product((0, 1), repeat=5)
        mean = sum(expected_best(o, draws) * p ** sum(o) * (1 - p) ** (5 - sum(o)) for o in outcomes)
        assert mean == pytest.approx(1 - (1 - p) ** draws, abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "answers", "want"),
    [
        ([1, 1, 0, 0, 0], ["4", "4", "5", "6", "7"], 1.0),
        ([1, 0, 0], ["4", "5", "5"], 0.0),
        ([1, 0], ["4", "5"], 0.5),  # a tie is decided by a coin
        ([1, 1, 0, 0, 0, 0], ["4", "4", "5", "5", "6", "6"], 1 / 3),
        ([1, 0, 0], ["4", None, None], 1.0),  # no answer is no vote
        ([0, 0], [None, None], 0.0),
        ([0.5, 1.0, 0.0], ["a", "a", "b"], 0.75),
    ],
)
def test_majority(scores: list[float], answers: list[str | None], want: float) -> None:
    assert majority(scores, answers) == pytest.approx(want)


def test_majority_of_ties_is_the_mean_over_all_decisions() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        answers = [str(a) for a in generator.integers(0, 4, size=7)]
        scores = [float(answer == "0") for answer in answers]
        counts = {answer: answers.count(answer) for answer in answers}
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        assert majority(scores, answers) == pytest.approx(sum(w == "0" for w in winners) / len(winners))


def test_the_interval_is_that_of_resampled_problems() -> None:
    generator = np.random.default_rng(1)
    values = generator.random((40, 2)) ** 2
    low, high = bootstrap(values, seed=3)
    rows = generator.integers(0, 40, size=(20_000, 40))
    for column in range(2):
        means = values[rows, column].mean(axis=1)
        assert low[column] == pytest.approx(np.percentile(means, 2.5), abs=0.01)
        assert high[column] == pytest.approx(np.percentile(means, 97.5), abs=0.01)
        assert low[column] < values[:, column].mean() < high[column]


def test_the_interval_is_repeatable_and_depends_on_the_seed() -> None:
    values = np.random.default_rng(1).random((40, 1))
    assert np.array_equal(bootstrap(values, seed=3), bootstrap(values, seed=3))
    assert not np.array_equal(bootstrap(values, seed=3), bootstrap(values, seed=4))


def test_one_problem_has_no_spread() -> None:
    low, high = bootstrap(np.array([[0.25, 1.0]]), seed=0)
    assert low.tolist() == high.tolist() == [0.25, 1.0]
