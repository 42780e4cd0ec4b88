"""Text of data, models and users' code as terminals, logs and pages show it: what would steer them is spelled out."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable

from ctpo_megatron.base.redact import hidden

_STEERS = (
    "\x00-\x1f\x7f-\x9f"  # control characters
    "\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # direction of writing, line ends, what cannot be seen
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations, tags
    "\ud800-\udfff"  # half characters, which cannot be encoded
)
_IN_A_LINE = re.compile(f"[{_STEERS}]")
_IN_LINES = re.compile(f"(?![\n\t])[{_STEERS}]|\r(?!\n)")


def printable(text: str, *, lines: bool = False) -> str:
    """`text` with control characters, marks of direction and half characters as escapes, such as `\\x1b`.

    lines: line ends and tabs stay. Joiners within words stay, which some scripts need.
    """
    if text.isascii() and text.isprintable():
        return text
    return (_IN_LINES if lines else _IN_A_LINE).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def say(*texts: str, error: bool = False) -> None:
    """Print lines, of which nothing steers a terminal, and without secrets. error: to stderr."""
    for text in texts:
        print(printable(hidden(text), lines=True), file=sys.stderr if error else sys.stdout, flush=True)


def log_to_terminal(form: str = "%(message)s") -> None:
    """Send the log to stderr, in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(form))
    logging.basicConfig(handlers=[handler])


class PrintableFormatter(logging.Formatter):
    """Formats records of which nothing steers a terminal, and without secrets; their lines stay."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return printable(hidden(super().format(record)), lines=True)


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as `0, 2-7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
