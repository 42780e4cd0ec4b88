"""Every metric of a run: rows of `known_metrics.toml`, which reference, report, display and trackers are made from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True, slots=True)
class Drawn:
    """How the report draws a metric: in which figure, as what, in which colour of its theme."""

    figure: str
    label: str = ""
    colour: str = "blue"
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """How the display prints a metric: its place in the line of a step, its label, and the format of its value."""

    place: int
    label: str
    format: str


@dataclass(frozen=True, slots=True)
class KnownMetric:
    """A row of the table: a metric, or several that share unit and definition.

    section: of docs/reference/metrics.md. names: `<word>` in them stands for what a run fills in. definition: Markdown.
    fault: whether it counts faults that a run survives. source: what a supervised step calls a metric of `sft.jsonl`.
    A row with any of the last four has one name.
    """

    section: str
    names: tuple[str, ...]
    unit: str
    definition: str
    drawn: Drawn | None = None
    printed: Printed | None = None
    fault: bool = False
    source: str = ""

    @property
    def name(self) -> str:
        """Return the first name."""
        return self.names[0]

    def has(self, metric: str) -> bool:
        """Return whether a metric of a run is one of these."""
        return any(re.fullmatch(_PLACEHOLDER.sub(".+", re.escape(name)), metric) for name in self.names)


def known_metric(name: str) -> KnownMetric | None:
    """Return the row of a metric of a run: the one that spells it, else the first that it may be; None without any."""
    spelled = (row for row in KNOWN_METRICS if name in row.names)
    return next(spelled, None) or next((row for row in KNOWN_METRICS if row.has(name)), None)


def printed(metrics: Mapping[str, float]) -> list[str]:
    """Return what a line of the display has of the metrics of a step."""
    rows = [(row.printed, metrics[row.name]) for row in KNOWN_METRICS if row.printed and row.name in metrics]
    return [f"{how.label} {format(value, how.format)}" for how, value in sorted(rows, key=lambda row: row[0].place)]


def drawn_in(figure: str) -> list[tuple[KnownMetric, Drawn]]:
    """Return the metrics of a figure of the report, and how it draws each."""
    return [(row, row.drawn) for row in KNOWN_METRICS if row.drawn is not None and row.drawn.figure == figure]


def _read() -> Iterator[KnownMetric]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    sections: dict[str, list[dict[str, Any]]] = tomllib.loads(text)
    for section, rows in sections.items():
        for row in rows:
            drawn, printed = row.pop("drawn", None), row.pop("printed", None)
            yield KnownMetric(
                section,
                tuple(row.pop("names")),
                **row,
                drawn=drawn and Drawn(**drawn),
                printed=printed and Printed(**printed),
            )


KNOWN_METRICS = tuple(_read())
"""In the order of docs/reference/metrics.md."""
