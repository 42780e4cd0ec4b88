"""Verdicts on the sqrt(t) law say what a resampling of the prompts leaves of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ctpo_megatron.base.positions import BINS, bin_of
from ctpo_megatron.report.position_law import (
    EXPONENTS,
    LawInterval,
    Points,
    fit_law,
    law_interval,
    points_of_sums,
    resampled,
)
from tests.report.dumped_walks import dump, run_of

SIGMA, LENGTH, SAMPLES = 0.0387, 300, 4
Walks = Sequence[NDArray[np.float64]]


def walks(count: int, spread: Callable[[NDArray[np.float64]], NDArray[np.float64]] = np.sqrt, seed: int = 0) -> Walks:
    """S_t whose standard deviation is SIGMA times the spread of t."""
    t = np.arange(1.0, LENGTH + 1)
    steps = np.sqrt(np.diff((SIGMA * spread(t)) ** 2, prepend=0.0))
    rng = np.random.default_rng(seed)
    return [np.cumsum(rng.normal(0, steps)) for _ in range(count)]


def sums(group: Walks) -> NDArray[np.float64]:
    """As of one prompt."""
    t = np.arange(1, LENGTH + 1)
    return sum(np.stack([np.bincount(bin_of(t), each, BINS) for each in (t * 0.0 + 1, t, s, s**2)]) for s in group)


def by_prompt(found: Walks, samples: int = SAMPLES) -> list[NDArray[np.float64]]:
    return [sums(found[place : place + samples]) for place in range(0, len(found), samples)]


def verdict(prompts: list[NDArray[np.float64]]) -> tuple[LawInterval, str]:
    interval, law = resampled(prompts), fit_law(points_of_sums(*sum(prompts)))
    assert law is not None
    return interval, interval.verdict(law)


def test_a_law_that_holds_is_found_with_its_interval() -> None:
    interval, text = verdict(by_prompt(walks(400)))
    assert interval.sigma[0] < SIGMA < interval.sigma[1] < 1.2 * interval.sigma[0]
    assert interval.exponent[0] < 0.5 < interval.exponent[1] and interval.holding == 1
    assert text.startswith("std(S_t) grows like sqrt(t), sigma 0.03") and "95 % over 100 prompts: sigma 0.03" in text


def test_a_law_that_fails_is_found() -> None:
    interval, text = verdict(by_prompt(walks(400, lambda t: t / 10)))
    assert interval.holding == 0 and interval.exponent[0] > 0.9
    assert text.startswith("std(S_t) does not grow like sqrt(t) here (R2 ")


def test_what_the_resamples_disagree_about_is_not_known() -> None:
    """A power at the border of what counts as the law."""
    interval, text = verdict(by_prompt(walks(80, lambda t: t**0.7)))
    assert 0.05 < interval.holding < 0.95
    assert text.startswith(f"whether std(S_t) grows like sqrt(t) is not known: it holds in {interval.holding:.0%} of")


def test_of_few_prompts_nothing_is_known() -> None:
    _, text = verdict(by_prompt(walks(19 * SAMPLES)))
    known = "19 prompts in the dumps, 20 are needed (R2 "
    assert text.startswith(f"whether std(S_t) grows like sqrt(t) is not known: {known}")
    assert verdict(by_prompt(walks(20 * SAMPLES)))[0].exponent[0] < 0.5


def test_alike_samples_of_a_prompt_count_once() -> None:
    """Eight copies of a trajectory say no more than one, though there are eight times as many tokens."""
    once = walks(40)
    one, copied = resampled(by_prompt(once, 1)), resampled([sums([walk] * 8) for walk in once])
    assert copied.exponent == pytest.approx(one.exponent, abs=0.06)
    apart = resampled(by_prompt(walks(320), 8))
    assert apart.exponent[1] - apart.exponent[0] < 0.6 * (copied.exponent[1] - copied.exponent[0])


@pytest.mark.parametrize(("power", "words"), [(4.0, "t^3.00 or more, the end"), (-2.0, "t^-1.00 or less, the end")])
def test_a_power_at_the_end_of_the_search_says_so(power: float, words: str) -> None:
    t = np.arange(1.0, 40.0)
    law = fit_law(Points(t, t**power, np.full(39, 100.0), np.ones(39)))
    assert law and law.exponent in (EXPONENTS[0], EXPONENTS[-1]) and law.free_fit.startswith(words)
    assert words in LawInterval(3).verdict(law)


def test_prompts_are_those_of_the_last_mini_batch_of_each_step(tmp_path: Path) -> None:
    found = walks(30 * SAMPLES)
    dump(tmp_path, 1, found[: 15 * SAMPLES], untraced=2)
    dump(tmp_path, 2, found[15 * SAMPLES :])
    # The prompts of both steps have the same names, but for two, so that most are drawn together.
    interval = law_interval([(run_of(tmp_path, 10), 1), (run_of(tmp_path, 10), 2)])
    assert interval.prompts == len({*range(7, 17), *range(5, 15)}) == 12
    dump(tmp_path, 3, found)
    one, expected = law_interval([(run_of(tmp_path, 25), 3)]), resampled(by_prompt(found[5 * SAMPLES :]))
    assert (one.prompts, one.exponent) == (25, pytest.approx(expected.exponent, abs=0.011))
    assert one.sigma == pytest.approx(expected.sigma, rel=1e-4)


def test_without_dumps_nothing_is_known(tmp_path: Path) -> None:
    assert law_interval([(run_of(tmp_path, 10), 1)]) == LawInterval(0)
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.jsonl").write_text("{}\n")
    (tmp_path / "trajectories" / "step_000002.parquet").write_text("damaged")
    assert law_interval([(run_of(tmp_path, 10), step) for step in (1, 2)]) == LawInterval(0)
