"""The comparison of groups of runs as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from ctpo_megatron.report.accuracies import AccuracyDifference, SourceComparison
from ctpo_megatron.report.confidence import Ends
from ctpo_megatron.report.estimates import ONE_SEED, Estimate
from ctpo_megatron.report.groups import RunGroup

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
    done = [max((record["step"] for record in run.metrics), default=0) for run in group.runs]
    return f"{min(done)}" if min(done) == max(done) else f"{min(done)} to {max(done)}"
