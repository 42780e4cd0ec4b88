"""Tables: drawn on a terminal, aligned plain lines in a file or a log."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ctpo_megatron.base.printable import say
from ctpo_megatron.base.terminal import Terminal
from ctpo_megatron.config import Problem


def print_table(title: str, header: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]) -> None:
    """Print rows of three columns under a title."""
    console = Terminal(highlight=False, markup=False)
    if console.is_terminal:
        table = Table(*header, title=Text(title), title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    say(f"\n{title}")
    for first, second, third in rows:
        say(f"  {first:<{widths[0]}}  {second:>{widths[1]}}  {third}".rstrip())


def print_numbers(title: str, says: str, header: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> None:
    """Print a table of numbers under a title and a sentence; columns of text are on the left, others on the right."""
    shown = [list(header), *([_shown(cell) for cell in row] for row in rows)]
    sides = ["<" if all(isinstance(cell, str) for cell in column) else ">" for column in zip(*rows, strict=True)]
    console = Terminal(highlight=False, markup=False)
    if console.is_terminal:
        table = Table()
        for name, side in zip(header, sides, strict=True):
            table.add_column(Text(name), justify="left" if side == "<" else "right")
        for row in shown[1:]:
            table.add_row(*row)
        console.print(f"\n{title}", style="bold")
        console.print(says, table, sep="\n")
        return
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    say(f"\n{title}", *textwrap.wrap(says, 118, initial_indent="  ", subsequent_indent="  "))
    for row in shown:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        say(f"  {'  '.join(cells)}".rstrip())


def _shown(cell: str | int | float) -> str:
    """Four decimals, or two digits and a power of ten of a number that has too few in them."""
    if isinstance(cell, float):
        return f"{cell:,.4f}" if cell == 0 or 1e-3 <= abs(cell) < 1e5 else f"{cell:.1e}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def print_warnings(warnings: Sequence[Problem]) -> None:
    """A line each."""
    for problem in warnings:
        say(f"warning: {problem}", error=True)
