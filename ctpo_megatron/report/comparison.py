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

from ctpo_megatron.base.files import read_note
from ctpo_megatron.base.run_paths import TUNING_RECORD
from ctpo_megatron.report.accuracies import common_step, compare_accuracies, notes_of_steps
from ctpo_megatron.report.confidence import Ends
from ctpo_megatron.report.endpoints import Endpoint, EndpointComparison, GroupDifference
from ctpo_megatron.report.estimates import ONE_SEED, Estimate
from ctpo_megatron.report.groups import RunGroup, groups_of, notes_of, run_name, shown
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.sampled_rewards import compare_rewards, notes_of_rewards
from ctpo_megatron.report.summary import LAST, Change, StepCost, summarize
from ctpo_megatron.report.theme import CYCLE
from ctpo_megatron.tracking import duration

UNKNOWN = "–"
"""Of a figure that no run of a group has."""


def value_table(groups: Sequence[RunGroup], found: Sequence[EndpointComparison]) -> Table:
    """Return values with 95 % intervals, a row for each group and endpoint."""
    table = _table(["", "seeds", "steps", "endpoint", "value", "95 % interval"])
    for group in groups:
        rows = [value for each in found if (value := each.of(group.label))]
        head: list[str | Text] = [Text(group.label, "bold"), _seeds(group), _steps(group)]
        if not rows:
            table.add_row(*head, Text("no evaluation, no reward", "dim"))
        for number, value in enumerate(rows):
            cells: list[str | Text] = [
                Text(value.endpoint.name),
                value.endpoint.text(value.estimate.value),
                _interval(value.estimate.interval, value.endpoint),
            ]
            table.add_row(*(["", "", ""] if number else head), *cells)
    return table


def difference_table(groups: Sequence[RunGroup], found: Sequence[EndpointComparison]) -> Table | None:
    """Return values less the one of the first group, with 95 % intervals, visible differences (80 % power), verdicts.

    None where there are no differences.
    """
    first = groups[0].label
    table = _table([f"less {first}", "endpoint", "difference", "95 % interval", "visible", "verdict"])
    for compared in found:
        for each in compared.differences:
            if each.other == first:
                table.add_row(Text(each.group, "bold"), Text(compared.endpoint.name), *_difference(each))
    return table if table.row_count else None


def cost_table(costs: Sequence[tuple[str, Mapping[str, tuple[str, str]]]]) -> Table | None:
    """What a step costs, a row for each group, as `Comparison.costs` has it; None where no step was timed."""
    columns = [name for name in costs[0][1] if any(cells[name][0] != UNKNOWN for _, cells in costs)]
    table = _table(["", *columns])
    for label, cells in costs:
        table.add_row(Text(label, "bold"), *(cells[name][0] for name in columns))
    return table if columns else None


_TEXTS = ("endpoint", "verdict")


def _table(labels: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, label in enumerate(labels):
        table.add_column(Text(label), justify="left" if place == 0 or label in _TEXTS else "right")
    return table


def notes_of_accuracies(found: Sequence[EndpointComparison]) -> list[str]:
    """What applies to figures of the table: problems left out, how pairs were made. Each is said once."""
    notes: dict[str, None] = {}
    for each in found:
        for accuracy in each.values:
            notes |= dict.fromkeys(_said(f"{accuracy.group}, {each.endpoint.name}", accuracy.estimate))
        for difference in (*each.differences, *each.gains):
            name = f"{difference.group} against {difference.other}, {each.endpoint.name}"
            notes |= dict.fromkeys(_said(name, difference.estimate))
    return list(notes)


def _said(name: str, estimate: Estimate) -> list[str]:
    """Notes of an estimate, with its name; of left out problems their number."""
    left_out = [f"{estimate.left_out} problems left out"] if estimate.left_out else []
    notes = [note for note in estimate.notes if note != ONE_SEED]  # notes_of says it of the group
    return [f"{name}: {note}." for note in (*notes, *left_out)]


def _difference(difference: GroupDifference) -> list[str | Text]:
    estimate, endpoint = difference.estimate, difference.endpoint
    decided = estimate.interval is not None and not estimate.interval[0] <= 0 <= estimate.interval[1]
    verdict = Text(difference.short_verdict, "bold" if decided else "dim")
    visible = UNKNOWN if estimate.visible is None else endpoint.text(estimate.visible)
    return [endpoint.text(estimate.value, "+"), _interval(estimate.interval, endpoint, "+"), visible, verdict]


def _interval(ends: Ends | None, endpoint: Endpoint, sign: str = "") -> str:
    return UNKNOWN if ends is None else " to ".join(endpoint.text(end, sign) for end in ends)


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
    """Runs, read once for the terminal, the page and the figures, and their groups.

    threshold: a mean reward, which steps are counted to; None: halfway up. tuned: keys that each group has its own pick
    of.
    """

    runs: list[RunData]
    groups: list[RunGroup]
    threshold: float | None = None
    tuned: frozenset[str] = frozenset()

    @classmethod
    def load(cls, directories: Sequence[Path], threshold: float | None = None) -> Comparison:
        """Read one run directory or more; the same one twice counts once.

        What a sweep has tuned, the file next to its runs says. Raises FileNotFoundError for one that is no run
        directory, DamagedFileError.
        """
        runs = list({directory.resolve(): RunData.load(directory) for directory in directories}.values())
        tuned = frozenset[str]().union(*map(_tuned_keys, {directory.resolve().parent for directory in directories}))
        return cls(runs, groups_of(runs), threshold, tuned)

    @cached_property
    def accuracies(self) -> list[EndpointComparison]:
        """Of each data source after the last common evaluation. Raises DamagedFileError."""
        return compare_accuracies(self.groups)

    @cached_property
    def rewards(self) -> list[EndpointComparison]:
        """Of the sampled reward: its mean over all steps, and the steps to the threshold."""
        return compare_rewards(self.groups, self.threshold)

    @property
    def endpoints(self) -> list[EndpointComparison]:
        """All of them, accuracies first. Raises DamagedFileError."""
        return [*self.accuracies, *self.rewards]

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
        """What to know of the groups and of their endpoints."""
        of_endpoints = [*notes_of_accuracies(self.accuracies), *notes_of_rewards(self.rewards, self.groups)]
        return [*notes_of_steps(self.groups), *notes_of(self.groups, self.tuned), *of_endpoints]


def _tuned_keys(folder: Path) -> list[str]:
    """Keys that the sweep of a folder has tuned."""
    loss = "which keys were tuned is unknown"
    return read_note(folder / TUNING_RECORD, lambda record: [*map(str, record["keys"])], [], loss)


@dataclass(frozen=True)
class GroupRow:
    """A row of the table of groups. cells: of an endpoint its 95 % interval, else smallest to largest of the runs."""

    label: str
    colour: str
    runs: list[tuple[str, str]]
    cells: list[tuple[str, str]]


def page_values(compared: Comparison) -> dict[str, Any]:
    """Values of the template for several runs. Raises DamagedFileError."""
    runs, groups, found = compared.runs, compared.groups, compared.endpoints
    columns = _columns(compared.results)
    rows = [
        GroupRow(
            group.label,
            CYCLE[place % len(CYCLE)],
            [(run_name(run), str(run.setting("run.seed", "?"))) for run in group.runs],
            [
                *(_value(each, group.label) for each in found),
                *(_cell([values.get(name) for values in results], form) for name, form in columns),
            ],
        )
        for place, (group, results) in enumerate(compared.results)
    ]
    pairs = [difference for each in found for difference in each.differences]
    return {
        "title": f"{len(runs)} runs",
        "headline": f"{_count(len(groups), 'configuration')}, {_count(len(runs), 'run')}.",
        "columns": [*(each.endpoint.name for each in found), *(name for name, _ in columns)],
        "groups": rows,
        "verdicts": [(each.endpoint.name, f"{each.group} against {each.other}", each.verdict) for each in pairs],
        "notes": compared.notes,
        "settings": [(key, [shown(group.settings[key]) for group in groups]) for key in groups[0].settings],
    }


def _value(compared: EndpointComparison, label: str) -> tuple[str, str]:
    value = compared.of(label)
    if value is None:
        return UNKNOWN, ""
    ends, endpoint = value.estimate.interval, value.endpoint
    return endpoint.text(value.estimate.value), "" if ends is None else _interval(ends, endpoint)


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
