"""S_t as a random walk: clip rates of the windows by formula and by simulation, drift, correlated increments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctpo_megatron.objective.positions import FIXED_WINDOW, WIDENING_WINDOW
from theory_walk import (
    Autoregressive,
    TokenPairs,
    UnequalTrajectories,
    clip_rate,
    clipped_share,
    drift,
    normal_walks,
    windows,
)

SIGMA, COUNT = 0.0387, 4_000
T = np.array([100, 1_000, 8_000])
WIDENING, FIXED = windows()
CLIP_RATES = {
    ("widening", False): (0.179, 0.179, 0.179),
    ("widening", True): (0.197, 0.257, 0.431),
    ("fixed", False): (0.018, 0.190, 0.371),
    ("fixed", True): (0.028, 0.273, 0.476),
}
"""(window, whether the drift is there) -> rate at `T`; computed independently of this package."""


def test_windows_are_those_of_the_figures_by_position() -> None:
    assert (FIXED.low, FIXED.high, FIXED.power) == pytest.approx((*FIXED_WINDOW, 0))
    assert (WIDENING.low, WIDENING.high, WIDENING.power) == (*WIDENING_WINDOW, 0.5)


@pytest.mark.parametrize(("which", "rates"), CLIP_RATES.items())
def test_clip_rates_to_three_digits(which: tuple[str, bool], rates: tuple[float, ...]) -> None:
    name, with_drift = which
    window = {each.name: each for each in windows()}[name]
    found = clip_rate(window, T, SIGMA * np.sqrt(T), drift(T, SIGMA) if with_drift else 0.0)
    assert found.round(3).tolist() == list(rates)


def test_the_drift_alone_reaches_the_lower_bounds() -> None:
    for window in windows():
        t = np.array([window.reached_by_drift(SIGMA)])
        assert drift(t, SIGMA) == pytest.approx(window.bounds(t)[0])
    assert round(WIDENING.reached_by_drift(SIGMA)) == 1_115


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    return normal_walks(np.random.default_rng(1), COUNT, T, SIGMA)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    rng = np.random.default_rng(2)
    return TokenPairs.random(rng, SIGMA).walks(rng, COUNT, T)


@pytest.mark.parametrize("window", windows(), ids=lambda window: window.name)
@pytest.mark.parametrize("kind", ["normal", "drift", "tokens"])
def test_simulated_clip_rates_are_within_four_standard_errors(
    kind: str, window: object, normal: np.ndarray, tokens: np.ndarray
) -> None:
    mean = 0.0 if kind == "normal" else drift(T, SIGMA)
    walks = tokens if kind == "tokens" else normal + mean
    positive = np.random.default_rng(3).random(COUNT) < 0.5
    expected = clip_rate(window, T, SIGMA * np.sqrt(T), mean)
    share, error = clipped_share(window, T, walks, positive)
    assert (np.abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / COUNT)).all()
    np.testing.assert_allclose(error, np.sqrt(expected * (1 - expected) / COUNT), rtol=0.25)


def test_clipped_share_counts_by_the_sign_of_the_advantage() -> None:
    walks = np.array([[0.2], [0.2], [-0.2], [-0.2]])  # bounds at t = 4: -.05 and .1
    share, error = clipped_share(WIDENING, np.array([4]), walks, np.array([True, False, True, False]))
    assert share == pytest.approx(0.5) and error == pytest.approx(0.25)
    share, _ = clipped_share(WIDENING, np.array([4]), walks, np.array([True, True, True, True]))
    assert share == pytest.approx(0.5)
    share, _ = clipped_share(WIDENING, np.array([4]), np.abs(walks), np.array([False] * 4))
    assert share == 0


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.floats(1e-4, 1.0))
def test_token_pairs_have_the_sigma_and_a_mean_ratio_of_one(seed: int, sigma: float) -> None:
    pairs = TokenPairs.random(np.random.default_rng(seed), sigma)
    mean, std = pairs.moments()
    assert std == pytest.approx(sigma, rel=1e-6) and mean < 0
    np.testing.assert_allclose(np.exp(pairs.target).sum(1), 1)
    np.testing.assert_allclose(np.exp(pairs.behaviour).sum(1), 1)


@pytest.mark.parametrize(
    "increments", [Autoregressive(SIGMA), UnequalTrajectories(SIGMA)], ids=lambda each: type(each).__name__
)
def test_correlated_increments_add_twice_the_sum_of_covariances(
    increments: Autoregressive | UnequalTrajectories,
) -> None:
    t, count = np.array([1, 10, 1_000]), 20_000
    walks = increments.sample(np.random.default_rng(7), count, t)
    squares = (walks - walks.mean(0)) ** 2
    error = squares.std(0) / math.sqrt(count)
    expected = increments.variances(t) + increments.covariances(t)
    assert (np.abs(squares.mean(0) - expected) < 4 * error).all()
    assert increments.covariances(t)[0] == 0
    assert increments.covariances(t)[2] > 4 * error[2], "an example whose covariances are not noise"


def test_covariances_of_autoregressive_increments_by_their_definition() -> None:
    by_pairs = sum(2 * SIGMA**2 * 0.3 ** (k - j) for k in range(1, 8) for j in range(1, k))
    assert Autoregressive(SIGMA).covariances(np.array([7]))[0] == pytest.approx(by_pairs, rel=1e-12)


def test_unequal_trajectories_have_a_mean_ratio_of_one() -> None:
    """What importance ratios of sampled tokens must have; at t = 1 and sigma = .5 the mean has little noise."""
    ratio = np.exp(UnequalTrajectories(0.5).sample(np.random.default_rng(8), 200_000, np.array([1])))
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(200_000)
