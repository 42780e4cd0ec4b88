"""Tables: drawn on a terminal, aligned plain lines in a file or a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(title: str, header: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]) -> None:
    """Print rows of three columns under a title."""
    console = Console()
    if console.is_terminal:
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    print(f"\n{title}")
    for first, second, third in rows:
        print(f"  {first:<{widths[0]}}  {second:>{widths[1]}}  {third}".rstrip())
