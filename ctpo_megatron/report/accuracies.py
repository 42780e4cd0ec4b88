"""Accuracies of groups of runs and their differences, an endpoint for each data source. docs/compare.md"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ctpo_megatron.report.endpoints import Endpoint, EndpointComparison
from ctpo_megatron.report.estimates import ScoredSet, difference, evaluated_steps, evaluations, mean_score
from ctpo_megatron.report.groups import RunGroup, run_name, runs_of

Evaluations = Mapping[str, Mapping[str, ScoredSet]]
"""Data source -> seed -> its problems."""


def compare_accuracies(groups: Sequence[RunGroup]) -> list[EndpointComparison]:
    """Of the last step that all runs were evaluated after, by data source; empty without evaluations.

    Without such a step: of the last evaluation of each run, and without differences. Raises DamagedFileError.
    """
    step = common_evaluation(groups)
    evaluated = [(group, evaluations(group, step)) for group in groups]
    sources = sorted({source for _, last in evaluated for source in last})
    return [_of_source(source, evaluated, differ=step is not None) for source in sources]


def common_evaluation(groups: Sequence[RunGroup]) -> int | None:
    """Return the last step after which all runs were evaluated, of those that were; None: there is none."""
    steps = [found for run in runs_of(groups) if (found := evaluated_steps(run))]
    return max(set.intersection(*steps), default=None) if steps else None


def notes_of_steps(groups: Sequence[RunGroup]) -> Iterator[str]:
    """At which step runs of different lengths are compared."""
    lasts = {run_name(run): max(found) for run in runs_of(groups) if (found := evaluated_steps(run))}
    if len(set(lasts.values())) > 1:
        step = common_evaluation(groups)
        shown = ", ".join(f"{name} {last}" for name, last in lasts.items())
        if step is None:
            yield f"Accuracies are not compared: no step was evaluated in all runs. They are of the last one: {shown}."
        else:
            yield f"Accuracies are compared after step {step}, the last one evaluated in all runs (last ones: {shown})."
    if len({run.last_step for run in runs_of(groups) if run.last_step}) > 1:
        yield f"Rewards and tool use are compared at step {common_step(groups)}, the last one that all runs have."


def common_step(groups: Sequence[RunGroup]) -> int:
    """Return the last step of the shortest run, of those that have made any; 0: none has."""
    return min((run.last_step for run in runs_of(groups) if run.last_step), default=0)


def _of_source(source: str, evaluated: Sequence[tuple[RunGroup, Evaluations]], differ: bool) -> EndpointComparison:
    after = {group.label: scores for group, last in evaluated if (scores := last.get(source))}
    endpoint = Endpoint(f"accuracy, {source}", scale=100, unit="points")
    found = EndpointComparison.of(endpoint, after, mean_score, difference if differ else None)
    for group, _ in evaluated:
        if missing := [seed for seed in group.seeds if seed not in after.get(group.label, group.seeds)]:
            found.values[group.label].notes.append(f"no evaluation of seed {', '.join(missing)}")
    return found
