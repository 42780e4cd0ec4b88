"""Problems of data files, collected so that one run reports all of them."""

from __future__ import annotations

from pathlib import Path

_SHOWN = 20


class DataError(ValueError):
    """A data file is missing or does not follow the schema of docs/data.md; the message lists every cause."""


class Problems:
    """Collects problems, so that one run reports all of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.converted = False
        """Whether one of the lines says how to convert a file."""

    def row(self, file: Path, row: int, column: str, value: object, reason: str) -> None:
        """Record a bad cell; rows count from 0."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        self.lines.append(f"{file} row {row} column {column!r}: {reason} (value: {shown})")

    def general(self, line: str) -> None:
        """Record a problem of a whole file."""
        self.lines.append(line)

    def shown(self) -> list[str]:
        """Return the first problems, and how many more there are."""
        total = len(self.lines)
        return [*self.lines[:_SHOWN], *([f"... and {total - _SHOWN} more"] if total > _SHOWN else [])]

    def raise_if_any(self) -> None:
        """Raise DataError with the first problems and their total number."""
        if total := len(self.lines):
            lines = "".join(f"\n  {line}" for line in self.shown())
            raise DataError(f"{total} problem{'s' * (total > 1)} in the data files:{lines}")
