"""The page that the first hour ends in: stages, figures beside the goals of benchmarks.kernels, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def page(stages: Sequence[Stage], records: Mapping[str, Mapping[str, Any]], environment: Mapping[str, Any]) -> str:
    """Markdown. records: by stage, the last of each."""
    parts = [f"# First hour on {environment['device']}", report.describe(dict(environment))]
    rows = [(stage.name, stage.purpose, *_outcome(records.get(stage.name))) for stage in stages]
    parts.append(report.markdown(("stage", "what it shows", "result", "seconds", "commit"), rows))
    if goals := _goals(records):
        header = ("goal", "demand", "stretch", "measured", "verdict")
        parts += ["## Kernels: measured beside the goals of benchmarks.kernels", report.markdown(header, goals)]
    if figures := _figures(records):
        parts += ["## Ring", report.markdown(("stage", "figure", "value"), figures)]
    for name, record in records.items():
        if record.get("tail"):
            parts += [f"## {name}: the end of its log", "```\n" + "\n".join(record["tail"]) + "\n```"]
    return "\n\n".join(parts) + "\n"


def _outcome(record: Mapping[str, Any] | None) -> tuple[str, float | None, str]:
    if record is None:
        return ("not run", None, "")
    detail = f": {record['detail']}" if record.get("detail") else ""
    return (f"{record['status']}{detail}", record["seconds"] or None, record["commit"][:10])


def _goals(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Every goal once: each suite lists all of them and measures its own."""
    goals: dict[str, dict[str, str]] = {}
    for record in records.values():
        for goal in (record.get("figures") or {}).get("goals", ()):
            if goal["verdict"] != "not measured" or goal["goal"] not in goals:
                goals[goal["goal"]] = goal
    return [tuple(goal.values()) for goal in goals.values()]


def _figures(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    rows = []
    for name, record in records.items():
        figures = record.get("figures") or {}
        if "goals" in figures:
            continue
        chosen = STEP_FIGURES if name == "quickstart" else tuple(figures)
        rows += [(name, figure, figures[figure]) for figure in chosen if figure in figures]
    return rows
