"""Writes docs/map.md from stored results alone: each measurement with its interval and its prediction."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.ratio_map.cells import (
    EVAL_EVERY,
    FIRST,
    OBJECTIVES,
    RATES,
    REGIMES,
    SEEDS,
    STEPS,
    TASKS,
    TUNING_SEED,
    Cell,
    MapObjective,
    MapTask,
    Regime,
    cells,
)
from benchmarks.ratio_map.runs import PREDICTIONS_FILE, ROOT
from ctpo_megatron.report.confidence import Ends, student_interval, variance
from ctpo_megatron.report.power import visible_difference

FILE = ROOT / "docs" / "map.md"
PICTURE = (
    "\n![For each ratio and each kind of bound: the difference from CTPO, measured and predicted](figures/map.svg)\n"
)
NOTHING = "–"
HEAD = """\
# Which ratio wins where

<!-- Made by `python -m benchmarks.ratio_map --page` from benchmarks/results/ratio_map; do not edit. -->

Six objectives in four regimes on two tasks: {count} cells, {measured} of them measured. Each measurement is shown with
an earlier prediction by a [simulation](../benchmarks/ratio_map/lab.py) in numpy. That trains tables instead of a model,
with the same batches, updates and windows, in about a second a cell. Wrong predictions are kept.
{picture}
## What a cell is
| objective | ratio | its bound | settings |
|---|---|---|---|
{objectives}
The first three cut the gradient beyond the preset's bounds. The others multiply by the ratio, limited to {limit:g}.
All average over the tokens of a sequence, then over sequences. Formulas: [objective.md](objective.md#all-objectives).

| regime | batches |
|---|---|
{regimes}
| task | |
|---|---|
{tasks}
The runs of a task share one supervised stage. They have {steps} steps ({recorded} on a recording) of 32 prompts x 8
samples, and otherwise the quickstart's settings. In each regime each objective has the learning rate, {rates}, with the
higher endpoint on {first}, seed {tuning}. Seeds {seeds} are compared.

The endpoint is the mean sampled reward over all steps. On a recording all objectives have the same samples, so there it
is the mean reward on 256 held-out prompts, sampled after every {every} steps. Differences are paired by seed, with
Student's 95 % interval. Predictions are for 10 seeds, with the standard error of the paired difference. *Visible* is
the difference that could have been seen with [80 % power](compare.md#what-could-have-been-seen). *Acts on* is the share
of tokens on which a bound acts: of all tokens, and of positive ones with a sampler probability below .5.
"""


@dataclass(frozen=True)
class Difference:
    """An endpoint less that of the first objective. interval: None without a spread."""

    value: float
    interval: Ends | None
    visible: float | None

    @property
    def is_known(self) -> bool:
        """Whether its interval excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Stored:
    """Everything that is stored. results: cell name -> result. predictions: cell name -> prediction."""

    results: Mapping[str, Mapping[str, Any]]
    predictions: Mapping[str, Mapping[str, Any]]
    predicted_in: str

    @classmethod
    def load(cls, folder: Path) -> Stored:
        """Read a folder of results."""
        results = {cell.name: _read(folder / cell.file) for cell in cells() if (folder / cell.file).exists()}
        found = _read(folder / PREDICTIONS_FILE)
        return cls(results, found["cells"], f"{found['commit']}, {found['date']}")

    def measured(self, cell: Cell) -> Difference | None:
        """Return the measured difference from the first objective; None where one of the two has no result."""
        first = Cell(cell.task, cell.regime, OBJECTIVES[0])
        if cell.name not in self.results or first.name not in self.results or cell.objective.name == FIRST:
            return None
        return paired(*(self.values(each) for each in (cell, first)))

    def values(self, cell: Cell) -> dict[str, float]:
        """Return the endpoint of each seed."""
        return {seed: run["value"] for seed, run in self.results[cell.name]["seeds"].items()}

    def predicted(self, cell: Cell) -> tuple[float, float]:
        """Return the predicted difference from the first objective, paired by seed, and its standard error."""
        first = Cell(cell.task, cell.regime, OBJECTIVES[0])
        pairs = zip(self.predictions[cell.name]["values"], self.predictions[first.name]["values"], strict=True)
        less = [value - other for value, other in pairs]
        return fmean(less), math.sqrt(variance(less) / len(less))

    @cached_property
    def verdicts(self) -> list[tuple[Cell, Difference, float]]:
        """Cells that are measured and compared, with what was predicted."""
        return [(cell, found, self.predicted(cell)[0]) for cell in cells() if (found := self.measured(cell))]


def paired(values: Mapping[str, float], others: Mapping[str, float]) -> Difference:
    """Return the mean difference over common seeds, with interval and visible difference from two seeds on."""
    less = [values[seed] - others[seed] for seed in values if seed in others]
    if len(less) < 2:
        return Difference(fmean(less), None, None)
    interval = student_interval(less)
    parts = [(variance(less) / len(less), len(less) - 1)]
    return Difference(fmean(less), interval, visible_difference(parts, interval))


def text(folder: Path) -> str:
    """Return the page."""
    stored = Stored.load(folder)
    parts = [_head(stored), *(_of_task(stored, task) for task in TASKS), _verdicts(stored), _cost(stored)]
    return "\n".join(part for part in parts if part)


def _head(stored: Stored) -> str:
    return HEAD.format(
        count=len([*cells()]),
        measured=len(stored.results),
        objectives="".join(
            _row(f"`{each.name}`", each.ratio, each.bound, f"`{' '.join(each.settings)}`") for each in OBJECTIVES
        ),
        limit=1 + next(each.numbers.clip_high for each in OBJECTIVES if each.bound == "weighs"),
        regimes="".join(_row(each.name, each.words) for each in REGIMES),
        tasks="".join(_row(each.name, each.words) for each in TASKS),
        steps=STEPS,
        recorded=next(regime.steps for regime in REGIMES if regime.frozen),
        rates=" or ".join(RATES),
        first=TASKS[0].name,
        tuning=TUNING_SEED,
        seeds=", ".join(map(str, SEEDS)),
        every=EVAL_EVERY,
        picture=PICTURE if stored.results else "",
    )


HEADER = (
    *("objective", "rate", "endpoint", f"difference from `{FIRST}`", "visible", "predicted"),
    *("acts on", "predicted", "minutes"),
)


def _of_task(stored: Stored, task: MapTask) -> str:
    lines = [f"## {task.name}\n"]
    for regime in REGIMES:
        lines += [f"### {task.name}, {regime.name}\n", _row(*HEADER), _row(*["---"] * len(HEADER))]
        lines += [_cells(stored, task, regime, objective) for objective in OBJECTIVES]
        lines.append("\n")
    return "".join(line if line.startswith("|") or line == "\n" else f"{line}\n" for line in lines).rstrip() + "\n"


def _cells(stored: Stored, task: MapTask, regime: Regime, objective: MapObjective) -> str:
    cell = Cell(task, regime, objective)
    prediction, result = stored.predictions[cell.name], stored.results.get(cell.name)
    expected = NOTHING if objective.name == FIRST else "{:+.3f} ({:.3f})".format(*stored.predicted(cell))
    acts = _acts(prediction["cut"], prediction["uncertain"])
    if result is None:
        return _row(f"`{objective.name}`", *[NOTHING] * 4, expected, NOTHING, acts, NOTHING)
    runs, less = [*result["seeds"].values()], stored.measured(cell)
    uncertain = [run["uncertain"] for run in runs if run["uncertain"] is not None]
    measured = _acts(fmean(run["cut"] for run in runs), fmean(uncertain) if uncertain else None)
    minutes = f"{sum(run['seconds'] for run in runs) / 60:.1f}"
    value = f"{fmean(stored.values(cell).values()):.3f}"
    visible = NOTHING if less is None or less.visible is None else f"{less.visible:.3f}"
    difference = _difference_text(less)
    return _row(f"`{objective.name}`", result["rate"], value, difference, visible, expected, measured, acts, minutes)


def _acts(all_tokens: float, uncertain: float | None) -> str:
    return f"{all_tokens:.0%}, {NOTHING if uncertain is None else f'{uncertain:.0%}'}"


def _difference_text(less: Difference | None) -> str:
    if less is None:
        return NOTHING
    if less.interval is None:
        return f"{less.value:+.3f}"
    text = f"{less.value:+.3f} [{less.interval[0]:+.3f}, {less.interval[1]:+.3f}]"
    return f"**{text}**" if less.is_known else text


def _verdicts(stored: Stored) -> str:
    lines = ["## Prediction against measurement", "", f"Predicted in commit {stored.predicted_in}."]
    known = [each for each in stored.verdicts if each[1].is_known]
    missed = [(cell, less, expected) for cell, less, expected in known if less.value * expected <= 0]
    if not stored.verdicts:
        lines.append("Nothing is measured yet.")
        return "\n".join(lines) + "\n"
    lines.append(
        f"Of {len(stored.verdicts)} differences from `{FIRST}` the intervals of {len(known)} exclude 0, and "
        f"{len(known) - len(missed)} of these have the predicted sign."
    )
    for cell, less, expected in missed:
        lines.append(f"- {cell.name}: {_difference_text(less)}, predicted {expected:+.3f}.")
    return "\n".join(lines) + "\n"


def _cost(stored: Stored) -> str:
    if not stored.results:
        return ""
    seconds = sum(run["seconds"] for result in stored.results.values() for run in result["seeds"].values())
    machines = " and ".join(sorted({result["machine"] for result in stored.results.values()}))
    commits = ", ".join(sorted({result["commit"] for result in stored.results.values()}))
    return (
        f"## Cost\n\nThe compared runs took {seconds / 3600:.1f} hours on {machines}, in commits {commits}.\n"
        "Supervised stages, recordings and the choice of rates are not included.\n"
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
