"""The page that the first hour ends in: stages, figures beside what was expected, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_first_hour.expected import compared
from benchmarks.gpu_first_hour.stages import Stage
from benchmarks.kernels import report

STEP_FIGURES = (
    "reward/mean",
    "mismatch/log_prob_abs_max",
    "mismatch/log_prob_abs_mean",
    "actor/grad_norm",
    "time/step",
)
"""Of the last step of the quickstart; docs/reference/metrics.md."""


def page(
    stages: Sequence[Stage], records: Mapping[str, Mapping[str, Any]], environment: Mapping[str, Any], *, judged: bool
) -> str:
    """Markdown. records: by stage, the last of each. judged: compare with what a GPU is expected to do."""
    parts = [f"# First hour on {environment['device']}", report.describe(dict(environment))]
    rows = [(stage.name, stage.purpose, *_outcome(records.get(stage.name))) for stage in stages]
    parts.append(report.markdown(("stage", "what it shows", "result", "seconds", "commit"), rows))
    figures = {name: shown(name, record.get("figures")) for name, record in records.items()}
    ring = {name: of_stage for name, of_stage in figures.items() if "goals" not in of_stage}
    if judged and (bounds := list(compared(ring))):
        header = ("stage", "figure", "measured", "expected", "verdict", "what it is")
        parts += ["## Measured beside what was expected", report.markdown(header, bounds)]
    if goals := _goals(figures):
        header = ("goal", "demand", "stretch", "measured", "verdict")
        parts += ["## Kernels: measured beside the goals of benchmarks.kernels", report.markdown(header, goals)]
    if values := [(name, *row) for name, of_stage in ring.items() for row in _flat(of_stage)]:
        short = [row for row in values if not isinstance(row[2], list)]
        parts += ["## All figures", report.markdown(("stage", "figure", "value"), short)]
        parts += [f"{name}, {figure}: {value}" for name, figure, value in values if isinstance(value, list)]
    for name, record in records.items():
        if record.get("tail"):
            parts += [f"## {name}: the end of its log", "```\n" + "\n".join(record["tail"]) + "\n```"]
    return "\n\n".join(parts) + "\n"


def shown(stage: str, figures: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures of a stage that people read: of kernels the goals that were measured."""
    if figures is None:
        return {}
    if "goals" in figures:
        return {"goals": [goal for goal in figures["goals"] if goal["verdict"] != "not measured"]}
    chosen = STEP_FIGURES if stage == "quickstart" else tuple(figures)
    return {figure: figures[figure] for figure in chosen if figure in figures}


def _outcome(record: Mapping[str, Any] | None) -> tuple[str, float | None, str]:
    if record is None:
        return ("not run", None, "")
    detail = f": {record['detail']}" if record.get("detail") else ""
    return (f"{record['status']}{detail}", record["seconds"] or None, record["commit"][:10])


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from ((f"{name}: {part}", of_part) for part, of_part in value.items())
        else:
            yield name, value


def _goals(figures: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [tuple(goal.values()) for of_stage in figures.values() for goal in of_stage.get("goals", ())]
