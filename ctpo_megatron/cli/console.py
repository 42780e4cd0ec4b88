"""Tables: drawn on a terminal, aligned plain lines in a file or a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ctpo_megatron.base.terminal import Terminal
from ctpo_megatron.base.text import say
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


def print_warnings(warnings: Sequence[Problem]) -> None:
    """Print a line for each."""
    for problem in warnings:
        say(f"warning: {problem}", error=True)
