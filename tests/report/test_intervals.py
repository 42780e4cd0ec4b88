"""Curves of a group: mean and band over its seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from ctpo_megatron.report.groups import RunGroup, mean_and_band
from ctpo_megatron.report.run_data import RunData


def group(*curves: dict[int, float | None], seeds: str = "") -> RunGroup:
    """A run for each curve, step -> value; seeds: a character each, equal ones repeat a seed."""
    by_seed: dict[str, tuple[RunData, ...]] = {}
    for seed, curve in zip(seeds or "0123456789", curves, strict=False):
        metrics = [{"step": step, "m": value} for step, value in curve.items()]
        run = replace(RunData(Path("x"), {}, {}, [], [], {}), metrics=metrics)
        by_seed[seed] = (*by_seed.get(seed, ()), run)
    return RunGroup("g", by_seed, {})


def test_three_seeds_have_students_interval() -> None:
    band = mean_and_band(group({1: 0.1, 2: 0.5}, {1: 0.4, 2: 0.5}, {1: 0.4, 2: 0.5}), "m")
    assert band and band.low and band.high
    expected = stats.ttest_1samp([0.1, 0.4, 0.4], 0).confidence_interval()
    assert (band.x, band.y) == ([1, 2], pytest.approx([0.3, 0.5]))
    assert (band.low[0], band.high[0]) == pytest.approx((expected.low, expected.high))
    assert (band.low[1], band.high[1]) == pytest.approx((0.5, 0.5))


def test_two_seeds_have_their_range() -> None:
    band = mean_and_band(group({1: 0.1}, {1: 0.4}), "m")
    assert band and (band.low, band.high) == ([0.1], [0.4])


def test_one_seed_has_no_band() -> None:
    """Also if it was run twice: then its value is the mean."""
    band = mean_and_band(group({1: 0.1}, {1: 0.4}, seeds="00"), "m")
    assert band and (band.y, band.low, band.high) == ([0.25], None, None)


def test_steps_that_a_seed_lacks_are_left_out() -> None:
    band = mean_and_band(group({1: 0.1, 2: None, 3: 0.3}, {1: 0.1, 2: 0.2, 3: 0.5, 4: 0.9}), "m")
    assert band and (band.x, band.y) == ([1, 3], pytest.approx([0.1, 0.4]))


def test_seeds_without_the_metric_do_not_count() -> None:
    band = mean_and_band(group({1: 0.1}, {1: None}), "m")
    assert band and (band.y, band.low) == ([0.1], None)
    assert mean_and_band(group({1: None}), "m") is None


def test_seeds_without_a_common_step() -> None:
    band = mean_and_band(group({1: 0.1}, {2: 0.2}), "m")
    assert band and (band.x, band.low) == ([], [])
