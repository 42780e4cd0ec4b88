"""Scores of evaluations, problem by problem; their means and differences with intervals: what is paired with what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.run_paths import EVALUATION
from ctpo_megatron.report.confidence import Ends, SignedTables, hierarchical_interval, seeds_interval
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.power import seed_parts, table_parts, visible_difference
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.tracking import read_heads, trajectory_files

if TYPE_CHECKING:
    from numpy.typing import NDArray


ScoredSet = Mapping[str, "ScoredProblem"]
"""By prompt id."""


@dataclass(frozen=True)
class ScoredProblem:
    """answer: the ground truth. score: mean over the samples with a verdict; None: no sample has one."""

    answer: str
    score: float | None


def same_problems(many: Sequence[ScoredSet]) -> bool:
    """Return whether they have prompts in common, and equal ids mean equal ground truths.

    A task that was made with another seed has the same ids and other problems.
    """
    common = set.intersection(*map(set, many)) if many else set()
    return bool(common) and all(len({each[name].answer for each in many}) == 1 for name in common)


def judged_in_all(many: Sequence[ScoredSet]) -> list[str]:
    """Ids of the problems with a score everywhere, in the order of the first."""
    return [name for name in many[0] if all(name in each and each[name].score is not None for each in many)]


def evaluations(group: RunGroup, step: int | None) -> dict[str, dict[str, ScoredSet]]:
    """Return data source -> seed -> its problems, of the evaluation of each run after that step.

    step: None: the last one of each run. Raises DamagedFileError.
    """
    found: dict[str, dict[str, ScoredSet]] = {}
    for seed, runs in group.by_seed.items():
        dumps = [dump for run in runs if (dump := _dump(run, step))]
        for source, problems in _merged([_read(dump) for dump in dumps]).items():
            found.setdefault(source, {})[seed] = problems
    return found


def evaluated_steps(run: RunData) -> set[int]:
    """Steps after which a run was evaluated, without the evaluation before training."""
    return {step for step in trajectory_files(run.directory, EVALUATION) if step > 0}


def _dump(run: RunData, step: int | None) -> Path | None:
    asked = max(evaluated_steps(run), default=None) if step is None else step
    return None if asked is None else trajectory_files(run.directory, EVALUATION).get(asked)


def _read(path: Path) -> dict[str, dict[str, ScoredProblem]]:
    answers: dict[str, dict[str, str]] = {}
    scores: dict[tuple[str, str], list[float]] = {}
    for each in read_heads(path):
        answers.setdefault(each.data_source, {})[each.prompt_id] = each.answer
        if each.reward is not None:
            scores.setdefault((each.data_source, each.prompt_id), []).append(each.reward)
    return {
        source: {
            name: ScoredProblem(answer, _mean_of_judged(scores.get((source, name))))
            for name, answer in problems.items()
        }
        for source, problems in answers.items()
    }


def _merged(repeated: Sequence[Mapping[str, Mapping[str, ScoredProblem]]]) -> Mapping[str, ScoredSet]:
    """The mean of runs of one seed, which have the same problems."""
    merged: dict[str, dict[str, ScoredProblem]] = {}
    for source in dict.fromkeys(source for each in repeated for source in each):
        many = [each[source] for each in repeated if source in each]
        names = dict.fromkeys(name for each in many for name in each)
        merged[source] = {}
        for name in names:
            same = [each[name] for each in many if name in each]
            score = _mean_of_judged([problem.score for problem in same if problem.score is not None])
            merged[source][name] = ScoredProblem(same[0].answer, score)
    return merged


def _mean_of_judged(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


ONE_SEED = "one seed: says nothing about other seeds"


@dataclass(frozen=True)
class Estimate:
    """A mean score, or a difference of two, with its 95 % interval.

    interval: over what `over` names; None where nothing can be said. left_out: problems without a verdict or without a
    counterpart. notes: what a reader has to know of it. visible: the true difference from 0 that 80 % of such
    comparisons would see; None where there is no interval.
    """

    value: float
    interval: Ends | None
    over: str
    left_out: int
    notes: list[str]
    visible: float | None = None


def mean_score(by_seed: Mapping[str, ScoredSet]) -> Estimate:
    """Return the mean score over problems and seeds. by_seed: seed -> its problems, one seed or more."""
    many = [*by_seed.values()]
    if len(many) > 1 and not same_problems(many):
        return _over_seeds([_judged(problems) for problems in many], _bounds(many, 0.0), _unjudged(many), [])
    names = judged_in_all(many)
    left_out = len(set.union(*map(set, many))) - len(names)
    table = _table(many, names)
    return _estimate([[(1.0, table)]], _bounds(many, 0.0), left_out, [])


def difference(by_seed: Mapping[str, ScoredSet], others: Mapping[str, ScoredSet]) -> Estimate:
    """Mean score of one evaluation less the one of another, paired by problem and by seed as far as both have them.

    by_seed, others: seed -> its problems, one seed or more.
    """
    common, notes = paired_seeds(by_seed, others)
    paired = common is not None
    left, right = ([each[seed] for seed in (each if common is None else common)] for each in (by_seed, others))
    bounds = _bounds([*left, *right], -1.0)
    if same_problems([*left, *right]):
        names = judged_in_all([*left, *right])
        left_out = len(set.union(*map(set, [*left, *right]))) - len(names)
        a, b = _table(left, names), _table(right, names)
        if paired:
            return _estimate([[(1.0, a - b)]], bounds, left_out, notes)
        return _estimate([[(1.0, a), (-1.0, b)]], bounds, left_out, notes)
    if paired and all(same_problems(pair) for pair in zip(left, right, strict=True)):
        return _within_seeds(left, right, notes)
    return _unpaired(left, right, [*notes, "not paired: the groups have other problems"])


def _within_seeds(left: Sequence[ScoredSet], right: Sequence[ScoredSet], notes: list[str]) -> Estimate:
    """Where each seed has problems of its own, which both sides have."""
    found, left_out = [], 0
    for pair in zip(left, right, strict=True):
        names = judged_in_all(pair)
        found.append([score - other for score, other in zip(*(_scores(each, names) for each in pair), strict=True)])
        left_out += len(pair[0].keys() | pair[1].keys()) - len(names)
    return _over_seeds(found, _bounds([*left, *right], -1.0), left_out, notes)


def _over_seeds(scores: Sequence[Sequence[float]], bounds: Ends | None, left_out: int, notes: list[str]) -> Estimate:
    """Of the scores, or differences, of each seed's own problems."""
    interval, visible = _seeds([scores], bounds)
    value = _mean([_mean(each) for each in scores])
    return Estimate(value, interval, "seeds", left_out, [*notes, "each seed has problems of its own"], visible)


def _seeds(sides: Sequence[Sequence[Sequence[float]]], bounds: Ends | None) -> tuple[Ends | None, float | None]:
    """Interval and visible difference over seeds; None where a side has one seed, or one without scores."""
    if not all(all(side) and len(side) > 1 for side in sides):
        return None, None
    interval = seeds_interval(sides, bounds)
    return interval, visible_difference(seed_parts(sides), interval)


def _unpaired(left: Sequence[ScoredSet], right: Sequence[ScoredSet], notes: list[str]) -> Estimate:
    sides = [left, right]
    if all(len(side) == 1 or same_problems(side) for side in sides):
        names = [judged_in_all(side) for side in sides]
        tables = [_table(side, judged) for side, judged in zip(sides, names, strict=True)]
        known = sum(len(set.union(*map(set, side))) for side in sides)
        blocks = [[(1.0, tables[0])], [(-1.0, tables[1])]]
        return _estimate(blocks, _bounds([*left, *right], -1.0), known - sum(map(len, names)), notes)
    scores = [[_judged(problems) for problems in side] for side in sides]
    interval, visible = _seeds(scores, _bounds([*left, *right], -1.0))
    means = [_mean([_mean(each) for each in side]) for side in scores]
    return Estimate(means[0] - means[1], interval, "seeds", _unjudged([*left, *right]), notes, visible)


def _estimate(blocks: Sequence[SignedTables], bounds: Ends | None, left_out: int, notes: list[str]) -> Estimate:
    """Of one table, or of the difference of two."""
    tables = [(factor, table) for block in blocks for factor, table in block]
    few = min(table.shape[1] for _, table in tables)
    several = all(len(table) > 1 for _, table in tables)
    if not several:
        # The spread over seeds is unknown on one side: what the other side has of it must not pass for the whole.
        blocks = [[(factor, table.mean(0, keepdims=True)) for factor, table in block] for block in blocks]
        notes = [*notes, ONE_SEED]
    if few == 0:
        return Estimate(math.nan, None, "", left_out, [*notes, "no problem is judged on both sides"])
    value = sum(factor * float(table.mean()) for factor, table in tables)
    over = "problems and seeds" if several else "problems"
    if few == 1:
        return Estimate(value, None, over, left_out, [*notes, "one problem"])
    interval = hierarchical_interval(blocks, bounds)
    visible = visible_difference(table_parts(blocks), interval)
    return Estimate(value, interval, over, left_out, notes, visible)


def _bounds(many: Sequence[ScoredSet], lowest: float) -> Ends | None:
    """Of a mean (`lowest` 0) or a difference (-1) of scores that are between 0 and 1; None for other scores."""
    scores = [each.score for problems in many for each in problems.values() if each.score is not None]
    return (lowest, 1.0) if scores and min(scores) >= 0 and max(scores) <= 1 else None


def paired_seeds(by_seed: Mapping[str, object], others: Mapping[str, object]) -> tuple[list[str] | None, list[str]]:
    """Return the seeds that a difference of two groups pairs, from two common ones on, and notes of the others.

    None: it pairs none.
    """
    common = [seed for seed in by_seed if seed in others]
    if len(common) > 1 or len(by_seed) == len(others) == len(common):
        rest = [seed for seed in {**by_seed, **others} if seed not in common]
        return common, [f"paired by seed, without {', '.join(rest)}"] if rest else []
    return None, [] if len(by_seed) == len(others) == 1 else ["not paired by seed"]


def _table(many: Sequence[ScoredSet], names: Sequence[str]) -> NDArray[Any]:
    """`[S, P]`."""
    import numpy as np

    return np.array([[problems[name].score for name in names] for problems in many], np.float64)


def _judged(problems: ScoredSet) -> list[float]:
    """The scores of the problems with a verdict."""
    return _scores(problems, judged_in_all([problems]))


def _scores(problems: ScoredSet, names: Sequence[str]) -> list[float]:
    return [score for name in names if (score := problems[name].score) is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _unjudged(many: Sequence[ScoredSet]) -> int:
    return sum(len(problems) - len(judged_in_all([problems])) for problems in many)
