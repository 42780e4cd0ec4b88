"""Runs that are compared: tables for a terminal of 80 columns, and what the page shows of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from ctpo_megatron.report.accuracies import (
    AccuracyDifference,
    SourceComparison,
    common_step,
    compare_accuracies,
    notes_of_steps,
)
from ctpo_megatron.report.confidence import Ends
from ctpo_megatron.report.estimates import ONE_SEED, Estimate
from ctpo_megatron.report.groups import RunGroup, groups_of, notes_of, run_name, shown
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.summary import LAST, Change, StepCost, summarize
from ctpo_megatron.report.theme import CYCLE
from ctpo_megatron.tracking import duration

UNKNOWN = "–"
"""Of a figure that no run of a group has."""


def accuracy_table(groups: Sequence[RunGroup], found: Sequence[SourceComparison]) -> Table:
    """Final accuracies with 95 % intervals, a row for each group and data source."""
    table = _table(["", "seeds", "steps", "source", "accuracy", "95 % interval"])
    for group in groups:
        rows = [(each, accuracy) for each in found for accuracy in each.accuracies if accuracy.group == group.label]
        head: list[str | Text] = [Text(group.label, "bold"), _seeds(group), _steps(group)]
        if not rows:
            table.add_row(*head, Text("no evaluation", "dim"))
        for number, (source, accuracy) in enumerate(rows):
            estimate = accuracy.estimate
            cells: list[str | Text] = [
                Text(source.source),
                f"{estimate.value:.3f}",
                _interval(estimate.interval, ".3f"),
            ]
            table.add_row(*(["", "", ""] if number else head), *cells)
    return table


def difference_table(groups: Sequence[RunGroup], found: Sequence[SourceComparison]) -> Table | None:
    """Accuracies less the one of the first group, with 95 % intervals and verdicts; None where there are none."""
    first = groups[0].label
    table = _table([f"less {first}", "source", "difference", "95 % interval", "verdict"])
    for source in found:
        for each in source.differences:
            if each.other == first:
                table.add_row(Text(each.group, "bold"), Text(source.source), *_difference(each))
    return table if table.row_count else None


def cost_table(costs: Sequence[tuple[str, Mapping[str, tuple[str, str]]]]) -> Table | None:
    """What a step costs, a row for each group, as `Comparison.costs` has it; None where no step was timed."""
    columns = [name for name in costs[0][1] if any(cells[name][0] != UNKNOWN for _, cells in costs)]
    table = _table(["", *columns])
    for label, cells in costs:
        table.add_row(Text(label, "bold"), *(cells[name][0] for name in columns))
    return table if columns else None


_TEXTS = ("source", "verdict")


def _table(labels: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, label in enumerate(labels):
        table.add_column(Text(label), justify="left" if place == 0 or label in _TEXTS else "right")
    return table


def notes_of_accuracies(found: Sequence[SourceComparison]) -> list[str]:
    """What applies to figures of the table: problems left out, how pairs were made. Each is said once."""
    notes: dict[str, None] = {}
    for each in found:
        for accuracy in each.accuracies:
            notes |= dict.fromkeys(_said(f"{accuracy.group}, {each.source}", accuracy.estimate))
        for difference in (*each.differences, *each.gains):
            name = f"{difference.group} against {difference.other}, {each.source}"
            notes |= dict.fromkeys(_said(name, difference.estimate))
    return list(notes)


def _said(name: str, estimate: Estimate) -> list[str]:
    """Notes of an estimate, with its name; of left out problems their number."""
    left_out = [f"{estimate.left_out} problems left out"] if estimate.left_out else []
    notes = [note for note in estimate.notes if note != ONE_SEED]  # notes_of says it of the group
    return [f"{name}: {note}." for note in (*notes, *left_out)]


def _difference(difference: AccuracyDifference) -> list[str | Text]:
    estimate = difference.estimate
    decided = estimate.interval is not None and not estimate.interval[0] <= 0 <= estimate.interval[1]
    verdict = Text(difference.short_verdict, "bold" if decided else "dim")
    return [f"{estimate.value:+.3f}", _interval(estimate.interval, "+.3f"), verdict]


def _interval(ends: Ends | None, form: str) -> str:
    return UNKNOWN if ends is None else f"{ends[0]:{form}} to {ends[1]:{form}}"


def _seeds(group: RunGroup) -> str:
    repeated = len(group.runs) - len(group.seeds)
    return f"{len(group.seeds)}" + (f" (+{repeated} repeated)" if repeated else "")


def _steps(group: RunGroup) -> str:
    """Steps that the runs have made, lowest to highest."""
    done = [run.last_step for run in group.runs]
    return f"{min(done)}" if min(done) == max(done) else f"{min(done)} to {max(done)}"


SECONDS, SAMPLES, TOKENS, MFU = "seconds a step", "samples/s", "tokens/s", "MFU of the update"
TRAINER_WAITS, ENGINES_WAIT = "trainer waits", "engines wait"
COST_FORMS = {SECONDS: ".3g", SAMPLES: ".3g", TOKENS: ".3s", TRAINER_WAITS: ".0%", ENGINES_WAIT: ".0%", MFU: ".1%"}
"""Columns of what a step costs (`StepCost`)."""


@dataclass(frozen=True)
class Comparison:
    """Runs, read once for the terminal, the page and the figures, and their groups."""

    runs: list[RunData]
    groups: list[RunGroup]

    @classmethod
    def load(cls, directories: Sequence[Path]) -> Comparison:
        """One run directory or more; the same one twice counts once.

        Raises FileNotFoundError for one that is no run directory, DamagedFileError.
        """
        runs = list({directory.resolve(): RunData.load(directory) for directory in directories}.values())
        return cls(runs, groups_of(runs))

    @cached_property
    def accuracies(self) -> list[SourceComparison]:
        """Raises DamagedFileError."""
        return compare_accuracies(self.groups)

    @cached_property
    def results(self) -> list[tuple[RunGroup, list[dict[str, float]]]]:
        """Each group with the results of its runs by name."""
        step = common_step(self.groups)
        return [(group, [_results(run, step) for run in group.runs]) for group in self.groups]

    @cached_property
    def costs(self) -> list[tuple[str, dict[str, tuple[str, str]]]]:
        """Label of each group, and by column the mean of its runs and, where they differ, their range."""
        return [
            (group.label, {name: _cell([each.get(name) for each in found], form) for name, form in COST_FORMS.items()})
            for group, found in self.results
        ]

    @cached_property
    def notes(self) -> list[str]:
        """What to know of the groups and of their accuracies."""
        return [*notes_of_steps(self.groups), *notes_of(self.groups), *notes_of_accuracies(self.accuracies)]


@dataclass(frozen=True)
class GroupRow:
    """A row of the table of groups. cells: of an accuracy its 95 % interval, else smallest to largest of the runs."""

    label: str
    colour: str
    runs: list[tuple[str, str]]
    cells: list[tuple[str, str]]


def page_values(compared: Comparison) -> dict[str, Any]:
    """Values of the template for several runs. Raises DamagedFileError."""
    runs, groups, found = compared.runs, compared.groups, compared.accuracies
    columns = _columns(compared.results)
    rows = [
        GroupRow(
            group.label,
            CYCLE[place % len(CYCLE)],
            [(run_name(run), str(run.setting("run.seed", "?"))) for run in group.runs],
            [
                *(_accuracy(source, group.label) for source in found),
                *(_cell([values.get(name) for values in results], form) for name, form in columns),
            ],
        )
        for place, (group, results) in enumerate(compared.results)
    ]
    pairs = [difference for source in found for difference in source.differences]
    return {
        "title": f"{len(runs)} runs",
        "headline": f"{_count(len(groups), 'configuration')}, {_count(len(runs), 'run')}.",
        "columns": [*(f"accuracy, {source.source}" for source in found), *(name for name, _ in columns)],
        "groups": rows,
        "verdicts": [(each.source, f"{each.group} against {each.other}", each.verdict) for each in pairs],
        "notes": compared.notes,
        "settings": [(key, [shown(group.settings[key]) for group in groups]) for key in groups[0].settings],
    }


def _accuracy(source: SourceComparison, label: str) -> tuple[str, str]:
    for each in source.accuracies:
        if each.group == label:
            ends = each.estimate.interval
            return f"{each.estimate.value:.3f}", "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"
    return UNKNOWN, ""


def _results(run: RunData, step: int) -> dict[str, float]:
    """What training has reached after that step, and what the whole run took."""
    summary, then = summarize(run), summarize(run.until(step))
    found: dict[str, Change | float | None] = {
        f"reward, last {LAST} steps": then.reward,
        "tool use": then.tool_use,
        "RL steps": float(summary.steps),
        "tokens": summary.tokens,
        "time": summary.wall_s,
    }
    if (cost := StepCost.of(run)) is not None:
        found |= {
            SECONDS: cost.step_s,
            SAMPLES: cost.samples_per_s,
            TOKENS: cost.tokens_per_s,
            TRAINER_WAITS: cost.trainer_waits,
            ENGINES_WAIT: cost.engines_idle,
            MFU: cost.mfu("update"),
        }
    known = {name: value for name, value in found.items() if value is not None}
    return {name: value.end if isinstance(value, Change) else value for name, value in known.items()}


def _columns(results: Sequence[tuple[RunGroup, Sequence[dict[str, float]]]]) -> list[tuple[str, str]]:
    """Names of the results that any run has, each with its format."""
    names = dict.fromkeys(name for _, found in results for values in found for name in values)
    forms = {"tool use": ".0%", "RL steps": ",.0f", "tokens": ".3s", "time": "time", **COST_FORMS}
    return [(name, forms.get(name, ".3f")) for name in names]


def _cell(values: Sequence[float | None], form: str) -> tuple[str, str]:
    known = [value for value in values if value is not None]
    if not known:
        return UNKNOWN, ""
    low, high = (_text(end, form) for end in (min(known), max(known)))
    return _text(fmean(known), form), "" if low == high else f"{low} to {high}"


def _text(value: float, form: str) -> str:
    if form == "time":
        return duration(value)
    return in_short(value) if form == ".3s" else format(value, form)


def in_short(value: float) -> str:
    """Such as 1.23k, 4.5M and 6B."""
    units = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{value / size:.3g}{unit}" for size, unit in units if value >= size), f"{value:.0f}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
