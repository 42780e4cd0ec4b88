"""Coverage of the intervals of `ctpo compare`, and whether differences of 80 % power are seen in 80 %, by simulation.

    python -m benchmarks.intervals --out benchmarks/results/intervals.md

makes the page in about four minutes on one core. The exit status is 1 where an endpoint's intervals cover less than
.93, or those of the mean reward, paired by seed, more than .98, by more than chance. `--comparisons 100` is a try.
Everything is drawn from fixed seeds. tests/report/test_confidence.py and test_sampled_rewards.py repeat a part of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ctpo_megatron.report.confidence import hierarchical_interval, seeds_interval
from ctpo_megatron.report.estimates import Estimate
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.power import table_parts, visible_difference
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.sampled_rewards import METRIC, compare_rewards

RESAMPLES = 500
LEAST, MOST = 0.93, 0.98
STEPS = 12
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Accuracies:
    """Two objectives on the same problems. Logits of a right answer are normal: problems have a spread of 2, the effect
    of the objective on a problem of .7, a seed of `of_seed`, a seed on a problem of .5. samples: of a problem (avg@k).
    """

    seeds: int
    problems: int
    samples: int
    of_seed: float
    effect: float
    paired: bool = True

    def draw(self, generator: np.random.Generator) -> tuple[Numbers, Numbers]:
        """Return the scores of the two, `[S, P]` each."""
        size = (self.seeds, self.problems)
        difficulty = generator.normal(0, 2, self.problems)
        both = np.stack([difficulty, difficulty + self.effect + generator.normal(0, 0.7, self.problems)])[:, None]
        logits = both + generator.normal(0, self.of_seed, (2, self.seeds, 1)) + generator.normal(0, 0.5, (2, *size))
        first, second = generator.binomial(self.samples, 1 / (1 + np.exp(-logits))) / self.samples
        return first, second

    def estimate(self, generator: np.random.Generator, resamples: int = RESAMPLES) -> Estimate:
        """Return the second less the first of one comparison, as `ctpo compare` estimates it."""
        first, second = self.draw(generator)
        block = [(1.0, second - first)] if self.paired else [(1.0, second), (-1.0, first)]
        interval = hierarchical_interval([block], (-1.0, 1.0), resamples)
        visible = visible_difference(table_parts([block]), interval)
        return Estimate(float(second.mean() - first.mean()), interval, "problems and seeds", 0, [], visible)

    def true(self) -> float:
        """Return the difference over all problems and seeds, whose logits are normal: by quadrature."""
        return _true_accuracy(self.of_seed, self.effect)

    def with_difference(self, wanted: float) -> Accuracies | None:
        """Return the case with this true difference; None: no effect makes one."""
        return _solved(lambda effect: replace(self, effect=effect), wanted, 8.0)


@cache
def _true_accuracy(of_seed: float, effect: float) -> float:
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    variances = 2**2 + of_seed**2 + 0.5**2 + np.array([0, 0.7**2])
    logits = np.array([[0.0], [effect]]) + np.sqrt(variances)[:, None] * nodes
    first, second = (1 / (1 + np.exp(-logits))) @ weights / weights.sum()
    return float(second - first)


@dataclass(frozen=True)
class Rewards:
    """Learning curves of two objectives, 12 steps: reward = start + .6 (1 - exp(-step / pace)) + noise.

    start: .2, with a standard deviation of .05 over seeds, the same for both. log pace: that of 4, plus `slower` for
    the second objective, with deviations of .2 for a seed and of .15 for an objective under a seed. noise: .025, of a
    step. threshold: None for the mean reward. lift: added to the rewards of the second.
    """

    seeds: int
    threshold: float | None
    slower: float = 0.0
    lift: float = 0.0
    paired: bool = True

    def draw(self, generator: np.random.Generator, seeds: int) -> Numbers:
        """Return rewards `[2, seeds, STEPS]`."""
        start = 0.2 + generator.normal(0, 0.05, (1, seeds, 1))
        pace = np.log(4) + np.array([0.0, self.slower])[:, None, None] + generator.normal(0, 0.2, (1, seeds, 1))
        pace = pace + generator.normal(0, 0.15, (2, seeds, 1))
        curves = start + 0.6 * (1 - np.exp(-np.arange(1, STEPS + 1) / np.exp(pace)))
        curves = curves + generator.normal(0, 0.025, (2, seeds, STEPS))
        curves[1] += self.lift
        return curves

    def estimate(self, generator: np.random.Generator, resamples: int = RESAMPLES) -> Estimate:
        """Return the second less the first of one comparison, as `ctpo compare` estimates it."""
        first, second = self.draw(generator, self.seeds)
        if not self.paired:
            second = self.draw(generator, self.seeds)[1]
        groups = [_group("first", first, 0), _group("second", second, 0 if self.paired else self.seeds)]
        found = compare_rewards(groups, self.threshold)[0 if self.threshold is None else 1]
        return found.differences[0].estimate

    def true(self) -> float:
        """Return the difference over 50,000 seeds; 0 where nothing differs."""
        return _true_reward(self.threshold, self.slower, self.lift)[0] if self.slower or self.lift else 0.0

    def never(self) -> float:
        """Return the share of runs of the first objective that never reach the threshold."""
        return _true_reward(self.threshold, self.slower, self.lift)[1]

    def with_difference(self, wanted: float) -> Rewards | None:
        """Return the case with this true difference; None: no effect makes one."""
        if self.threshold is None:
            return replace(self, lift=wanted)
        sign = 1 if wanted > 0 else -1
        return _solved(lambda by: replace(self, slower=sign * by), wanted, 3.0)


@cache
def _true_reward(threshold: float | None, slower: float, lift: float) -> tuple[float, float]:
    many = Rewards(1, threshold, slower, lift)
    curves = many.draw(np.random.default_rng(9), 50_000)
    if threshold is None:
        means = curves.mean((1, 2))
        return float(means[1] - means[0]), 0.0
    reached = curves >= threshold
    steps = np.where(reached.any(2), reached.argmax(2) + 1, STEPS + 1).mean(1)
    return float(steps[1] - steps[0]), float(1 - reached[0].any(1).mean())


def _group(label: str, curves: Numbers, first_seed: int) -> RunGroup:
    by_seed = {}
    for number, curve in enumerate(curves):
        metrics = [{"step": step, METRIC: float(value)} for step, value in enumerate(curve, start=1)]
        by_seed[str(first_seed + number)] = (RunData(Path("x"), {}, {}, metrics, [], {}),)
    return RunGroup(label, by_seed, {})


Case = Accuracies | Rewards
C = TypeVar("C", Accuracies, Rewards)


def _solved(case: Callable[[float], C], wanted: float, most: float) -> C | None:
    low, high = 0.0, most
    if abs(case(high).true()) < abs(wanted):
        return None
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if abs(case(middle).true()) < abs(wanted) else (low, middle)
    return case((low + high) / 2)


def covered(case: Case, comparisons: int, resamples: int = RESAMPLES, seed: int = 5) -> tuple[float, float, float]:
    """Return shares of intervals that hold the true difference and that do not hold 0, and the median visible one."""
    generator, true, hits, apart, visible = np.random.default_rng(seed), case.true(), 0, 0, list[float]()
    for _ in range(comparisons):
        estimate = case.estimate(generator, resamples)
        assert estimate.interval is not None and estimate.visible is not None
        low, high = estimate.interval
        hits += low <= true <= high
        apart += not low <= 0 <= high
        visible.append(estimate.visible)
    return hits / comparisons, apart / comparisons, float(np.median(visible))


@dataclass(frozen=True)
class Row:
    """What a case showed. seen: shares told apart where the true difference is `visible`, then minus `visible`.

    None stands for a difference that no effect makes.
    """

    coverage: float
    visible: float
    seen: Sequence[float | None]


def row(case: Case, comparisons: int, signs: Sequence[int] = (1,)) -> Row:
    """Simulate a case, and the same one with the difference that it calls visible, times each of `signs`."""
    coverage, _, visible = covered(case, comparisons)
    larger = [case.with_difference(sign * visible) for sign in signs]
    return Row(coverage, visible, [each and covered(each, comparisons, seed=6)[1] for each in larger])


def own_problems(chance: float, seeds: int, comparisons: int) -> float:
    """Return how often the interval of an accuracy holds the true one, where each seed has 256 problems of its own."""
    generator, hits = np.random.default_rng(6), 0
    for _ in range(comparisons):
        scores = generator.binomial(1, chance, (seeds, 256)).astype(float)
        low, high = seeds_interval([scores.tolist()], (0.0, 1.0))
        hits += low <= chance <= high
    return hits / comparisons


SIZES = ((30, 8), (256, 1))
PAIRS = (2, 3, 5, 10)
THRESHOLDS = (0.5, 0.7, 0.75)
HEAD = """\
# Intervals of `ctpo compare`

Made by `python -m benchmarks.intervals` in commit {commit}, {day}: {count:,} simulated comparisons a cell, standard
error at most {error:.3f}, and {narrow:.3f} of a coverage. *Coverage* is the share of 95 % intervals that hold the true
difference. *Visible* is the median of the differences that the comparisons say could have been seen with 80 % power.
*Seen* is the share of comparisons that tell groups apart whose true difference is just that; a dash: no effect makes
one so large.
"""
OF_ACCURACY = """
## Accuracy after the last step
Effects are normal on the logit scale. Their standard deviations: 2 of a problem, .7 of the objective on a problem, .5
of a seed on a problem; of a seed, see the rows. There is no true difference.

| seeds, pairs | effect of a seed | problems, samples | coverage | visible | seen |
|---|---|---|---|---|---|
"""
OF_OWN = """
Each seed with 256 problems of its own: share of intervals of an accuracy that hold it.

| accuracy | seeds | coverage |
|---|---|---|
"""
OF_REWARD = """
## Mean reward over all steps
{model}

| seeds | paired by seed | second slower by | true difference | coverage | visible | seen |
|---|---|---|---|---|---|---|
"""
MODEL = """\
Curves of 12 steps: reward = start + .6 (1 - exp(-step / pace)) + noise. Standard deviations: .05 of start over seeds,
the same for both objectives; .2 of log pace for a seed, and .15 for an objective under a seed; .025 of the noise of a
step.\
"""
OF_STEPS = """
## Steps to a threshold
The same curves. A run that never reaches the threshold counts as 13 steps. *Seen* where the second is slower, and where
it is faster: a slower one has more spread.

| seeds | paired by seed | threshold | never reached | second slower by | true difference | coverage | visible | seen |
|---|---|---|---|---|---|---|---|---|
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns 1 where a coverage is out of bounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.intervals", description=__doc__)
    parser.add_argument("--out", type=Path, help="the page; without it, it is printed")
    parser.add_argument("--comparisons", type=int, default=1000, help="of a cell (default: 1000)")
    options = parser.parse_args(argv)
    page, wrong = simulated(options.comparisons)
    if options.out:
        options.out.write_text(page, encoding="utf-8")
    else:
        print(page)
    for problem in wrong:
        print(problem, file=sys.stderr)
    return int(bool(wrong))


def simulated(count: int) -> tuple[str, list[str]]:
    """Return the page, and what is out of bounds."""
    wrong: list[str] = []
    page = HEAD.format(
        commit=_commit(),
        day=date.today(),
        count=count,
        error=(0.25 / count) ** 0.5,
        narrow=(0.05 * 0.95 / count) ** 0.5,
    )
    page += OF_ACCURACY + "".join(_accuracy_lines(count, wrong)) + OF_OWN
    for chance in (0.6, 0.95, 0.99):
        for seeds in (2, 3):
            page += _line(
                f"{chance:g}", seeds, _bounded(own_problems(chance, seeds, count), wrong, count, "own problems")
            )
    page += OF_REWARD.format(model=MODEL) + "".join(_reward_lines(count, wrong))
    return page + OF_STEPS + "".join(_step_lines(count, wrong)), wrong


def _accuracy_lines(count: int, wrong: list[str]) -> list[str]:
    lines = []
    for seeds in (1, *PAIRS):
        for of_seed in (0.0,) if seeds == 1 else (0.0, 0.15, 0.5):
            for problems, samples in SIZES:
                case = Accuracies(seeds, problems, samples, of_seed, 0.0)
                found = row(case, count)
                name = f"accuracy, {case}"
                cells = _cells(found, wrong, count, name)
                lines.append(_line(seeds, f"{of_seed:g}", f"{problems}, avg@{samples}", *cells))
    return lines


def _reward_lines(count: int, wrong: list[str]) -> list[str]:
    lines = []
    for paired, counts in ((True, PAIRS), (False, (3, 5))):
        for seeds in counts:
            for slower in (0.0, 0.3):
                case = Rewards(seeds, None, slower, paired=paired)
                found = row(case, count, () if slower else (1,))
                cells = _cells(found, wrong, count, f"mean reward, {case}", MOST if paired else 1.0)
                said = "yes" if paired else "no"
                lines.append(_line(seeds, said, f"{slower:g}", f"{case.true():+.3f}", *cells))
    return lines


def _step_lines(count: int, wrong: list[str]) -> list[str]:
    lines = []
    for paired, counts in ((True, PAIRS), (False, (3,))):
        for seeds in counts:
            for threshold in THRESHOLDS:
                for slower in (0.0, 0.3):
                    case = Rewards(seeds, threshold, slower, paired=paired)
                    found = row(case, count, () if slower else (1, -1))
                    cells = _cells(found, wrong, count, f"steps, {case}", digits=1)
                    said = ("yes" if paired else "no", f"{threshold:g}", f"{case.never():.0%}", f"{slower:g}")
                    lines.append(_line(seeds, *said, f"{case.true():+.2f}", *cells))
    return lines


def _cells(
    found: Row, wrong: list[str], count: int, name: str, most: float = 1.0, digits: int = 3
) -> tuple[str, str, str]:
    seen = ", ".join("–" if share is None else f"{share:.2f}" for share in found.seen)
    return _bounded(found.coverage, wrong, count, name, most), f"{found.visible:.{digits}f}", seen


def _bounded(coverage: float, wrong: list[str], count: int, name: str, most: float = 1.0) -> str:
    """Format a coverage; one that is out of bounds by more than two standard errors is wrong."""
    chance = 2 * (0.95 * 0.05 / count) ** 0.5
    if not LEAST - chance <= coverage <= most + chance:
        wrong.append(f"{name}: coverage {coverage:.3f} is not between {LEAST} and {most}")
    return f"{coverage:.3f}"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
