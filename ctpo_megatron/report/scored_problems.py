"""What the evaluations of runs found, problem by problem, from their dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.base.run_paths import EVALUATION
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.tracking import read_scores, trajectory_files

ScoredSet = Mapping[str, "ScoredProblem"]
"""By prompt id."""


@dataclass(frozen=True)
class ScoredProblem:
    """answer: the ground truth. score: mean over the samples with a verdict; None: no sample has one."""

    answer: str
    score: float | None


@dataclass(frozen=True)
class Evaluations:
    """One evaluation of each seed of a group that has one. steps: after which they were made, each once, ascending."""

    by_seed: Mapping[str, Mapping[str, ScoredSet]]
    steps: list[int]

    @property
    def sources(self) -> list[str]:
        return sorted({source for sources in self.by_seed.values() for source in sources})

    def of(self, source: str) -> dict[str, ScoredSet]:
        """Seed -> its problems of a data source; without seeds that have none."""
        return {seed: sources[source] for seed, sources in self.by_seed.items() if source in sources}


def last_evaluations(group: RunGroup) -> Evaluations:
    """The last of each run, if it is not the one before training. Raises DamagedFileError."""
    return _evaluations(group, last=True)


def first_evaluations(group: RunGroup) -> Evaluations:
    """The one before training. Raises DamagedFileError."""
    return _evaluations(group, last=False)


def same_problems(many: Sequence[ScoredSet]) -> bool:
    """Whether they have prompts in common, and equal ids mean equal ground truths.

    A task that was made with another seed has the same ids and other problems.
    """
    common = set.intersection(*map(set, many)) if many else set()
    return bool(common) and all(len({each[name].answer for each in many}) == 1 for name in common)


def judged_in_all(many: Sequence[ScoredSet]) -> list[str]:
    """Ids of the problems with a score everywhere, in the order of the first."""
    return [name for name in many[0] if all(name in each and each[name].score is not None for each in many)]


def _evaluations(group: RunGroup, last: bool) -> Evaluations:
    by_seed, steps = {}, set()
    for seed, runs in group.by_seed.items():
        dumps = [dump for run in runs if (dump := _dump(run, last))]
        if dumps:
            steps |= {step for step, _ in dumps}
            by_seed[seed] = _merged([_read(path) for _, path in dumps])
    return Evaluations(by_seed, sorted(steps))


def _dump(run: RunData, last: bool) -> tuple[int, Path] | None:
    found = trajectory_files(run.directory, EVALUATION)
    steps = [step for step in found if (step > 0) == last]
    return (max(steps), found[max(steps)]) if steps else None


def _read(path: Path) -> dict[str, dict[str, ScoredProblem]]:
    answers: dict[str, dict[str, str]] = {}
    scores: dict[tuple[str, str], list[float]] = {}
    for each in read_scores(path):
        answers.setdefault(each.data_source, {})[each.prompt_id] = each.answer
        if each.reward is not None:
            scores.setdefault((each.data_source, each.prompt_id), []).append(each.reward)
    return {
        source: {name: ScoredProblem(answer, _mean(scores.get((source, name)))) for name, answer in problems.items()}
        for source, problems in answers.items()
    }


def _merged(repeated: Sequence[Mapping[str, Mapping[str, ScoredProblem]]]) -> Mapping[str, ScoredSet]:
    """The mean of runs of one seed, which have the same problems."""
    merged: dict[str, ScoredSet] = {}
    for source in dict.fromkeys(source for each in repeated for source in each):
        many = [each[source] for each in repeated if source in each]
        names = dict.fromkeys(name for each in many for name in each)
        merged[source] = {name: _mean_problem([each[name] for each in many if name in each]) for name in names}
    return merged


def _mean_problem(many: Sequence[ScoredProblem]) -> ScoredProblem:
    return ScoredProblem(many[0].answer, _mean([each.score for each in many if each.score is not None]))


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
