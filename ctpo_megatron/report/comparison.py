"""Runs that are compared: tables for a terminal of 80 columns and for the page, and what to know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from ctpo_megatron.report.endpoints import Endpoint, EndpointComparison
from ctpo_megatron.report.groups import RunGroup, groups_of, notes_of, run_name, shown
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.sampled_rewards import compare_rewards, notes_of_rewards
from ctpo_megatron.report.summary import LAST, Change, StepCost, summarize
from ctpo_megatron.report.theme import CYCLE
from ctpo_megatron.tracking import duration

UNKNOWN = "–"
"""What stands for a figure that no run of a group has."""
_TEXTS = ("", "endpoint", "verdict")
"""Columns of words; the others have numbers."""


@dataclass(frozen=True)
class TextTable:
    """Cells as text, the first of a row being the label of a group, or empty where it is the one above."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def is_text(self) -> list[bool]:
        """Whether a column has words."""
        return [label in _TEXTS or index == 0 for index, label in enumerate(self.header)]

    def drawn(self) -> Table:
        """Return it for a terminal."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for label, is_text in zip(self.header, self.is_text, strict=True):
            table.add_column(Text(label), justify="left" if is_text else "right")
        for label, *cells in self.rows:
            table.add_row(Text(label, "bold"), *map(Text, cells))
        return table


def value_table(groups: Sequence[RunGroup], found: Sequence[EndpointComparison]) -> TextTable:
    """Return values with 95 % intervals, a row for each group and endpoint."""
    rows = []
    for group in groups:
        cells = [
            [each.endpoint.name, each.endpoint.text(value.value), _interval(value.interval, each.endpoint)]
            for each in found
            if (value := each.values.get(group.label))
        ]
        first, *others = cells or [["no evaluation, no reward", "", ""]]
        rows += [[group.label, _seeds(group), _steps(group), *first], *(["", "", "", *other] for other in others)]
    return TextTable(["", "seeds", "steps", "endpoint", "value", "95 % interval"], rows)


def difference_table(groups: Sequence[RunGroup], found: Sequence[EndpointComparison]) -> TextTable | None:
    """Return values less the one of the first group, with 95 % intervals, visible differences (80 % power), verdicts.

    None where there are no differences.
    """
    first, rows = groups[0].label, []
    for compared in found:
        endpoint = compared.endpoint
        for each in compared.differences:
            if each.other != first:
                continue
            visible = UNKNOWN if each.estimate.visible is None else endpoint.text(each.estimate.visible)
            value, ends = endpoint.text(each.estimate.value, "+"), _interval(each.estimate.interval, endpoint, "+")
            rows.append([each.group, endpoint.name, value, ends, visible, each.short_verdict])
    header = ["group", "endpoint", f"minus {first}", "95 % interval", "visible", "verdict"]
    return TextTable(header, rows) if rows else None


def _interval(ends: Ends | None, endpoint: Endpoint, sign: str = "") -> str:
    return UNKNOWN if ends is None else " to ".join(endpoint.text(end, sign) for end in ends)


def _seeds(group: RunGroup) -> str:
    repeated = len(group.runs) - len(group.seeds)
    return f"{len(group.seeds)}" + (f" (+{repeated} repeated)" if repeated else "")


def _steps(group: RunGroup) -> str:
    """Steps that the runs have made, lowest to highest."""
    done = [run.last_step for run in group.runs]
    return f"{min(done)}" if min(done) == max(done) else f"{min(done)} to {max(done)}"


COSTS: Mapping[str, tuple[str, Callable[[StepCost], float | None]]] = {
    "seconds a step": (".3g", lambda cost: cost.step_s),
    "samples/s": (".3g", lambda cost: cost.samples_per_s),
    "tokens/s": (".3s", lambda cost: cost.tokens_per_s),
    "trainer waits": (".0%", lambda cost: cost.trainer_waits),
    "engines wait": (".0%", lambda cost: cost.engines_idle),
    "MFU of the update": (".1%", lambda cost: cost.mfu("update")),
}
"""Columns of what a step costs, with their forms."""
_FORMS = {"tool use": ".0%", "RL steps": ",.0f", "tokens": ".3s", "time": "time"}
_FORMS |= {name: form for name, (form, _) in COSTS.items()}


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

    def result_table(self) -> TextTable:
        """Return the mean result of each group and, on a line beneath it, the range of its runs where they differ."""
        names = dict.fromkeys(name for _, found in self.results for values in found for name in values)
        rows = [
            [group.label, *("\n".join(filter(None, _cell(found, name))) for name in names)]
            for group, found in self.results
        ]
        return TextTable(["", *names], rows)

    def cost_table(self) -> TextTable | None:
        """Return what a step costs, a row for each group; None where no step was timed."""
        names = [name for name in COSTS if any(name in values for _, found in self.results for values in found)]
        rows = [[group.label, *(_cell(found, name)[0] for name in names)] for group, found in self.results]
        return TextTable(["", *names], rows) if names else None

    @cached_property
    def notes(self) -> list[str]:
        """What to know of the groups and of their endpoints."""
        of_endpoints = dict.fromkeys(note for each in self.endpoints for note in each.notes)
        of_groups = [*notes_of_steps(self.groups), *notes_of(self.groups, self.tuned)]
        return [*of_groups, *of_endpoints, *notes_of_rewards(self.groups)]


def _tuned_keys(folder: Path) -> list[str]:
    """Keys that the sweep of a folder has tuned."""
    loss = "which keys were tuned is unknown"
    return read_note(folder / TUNING_RECORD, lambda record: [*map(str, record["keys"])], [], loss)


def page_values(compared: Comparison) -> dict[str, Any]:
    """Return the values of the template for several runs. Raises DamagedFileError."""
    runs, groups, found = compared.runs, compared.groups, compared.endpoints
    members = [", ".join(f"{run_name(run)} ({run.setting('run.seed', '?')})" for run in group.runs) for group in groups]
    colours = [CYCLE[index % len(CYCLE)] for index in range(len(groups))]
    pairs = [difference for each in found for difference in each.differences]
    return {
        "title": f"{len(runs)} runs",
        "headline": f"{_count(len(groups), 'configuration')}, {_count(len(runs), 'run')}.",
        "groups": [*zip([group.label for group in groups], colours, members, strict=True)],
        "tables": [
            ("Endpoints with their 95 % intervals.", value_table(groups, found)),
            ("Means over the runs of a group, and the smallest and the largest of the runs.", compared.result_table()),
        ],
        "verdicts": [(each.endpoint.name, f"{each.group} against {each.other}", each.verdict) for each in pairs],
        "notes": compared.notes,
        "settings": [(key, [shown(group.settings[key]) for group in groups]) for key in groups[0].settings],
    }


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
        found |= {name: of(cost) for name, (_, of) in COSTS.items()}
    known = {name: value for name, value in found.items() if value is not None}
    return {name: value.end if isinstance(value, Change) else value for name, value in known.items()}


def _cell(results: Sequence[dict[str, float]], name: str) -> tuple[str, str]:
    """Return the mean of a result over runs and, where they differ, its range."""
    known = [values[name] for values in results if name in values]
    if not known:
        return UNKNOWN, ""
    form = _FORMS.get(name, ".3f")
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
