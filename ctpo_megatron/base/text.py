"""Text as terminals, logs, pages and files show it: without secrets, and with what would steer them spelled out."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"(^|[._-])x?[_-]?(api|access|private|secret|auth|bearer|refresh|hf|hub|session)[_-]?(key|token|secret)s?$"
    r"|(^|[._-])(key|token|secret|password|passwd|passphrase|credentials?|authorization|cookie)$",
    re.IGNORECASE,
)
# `eos_token`, `sort_key` and their like say nothing about secrets.
_HARMLESS = re.compile(
    r"(^|[._-])(eos|bos|pad|stop|start|end|sep|unk|mask|call|tool|sort|best|prompt)_(token|key)$", re.I
)
_LOGIN = re.compile(r"(://)(?:[^/\s'\"?#:]*:[^/\s'\"?#]*|[^/\s'\"?#:@]{16,})@")
"""With a password, or as long as a token."""
_QUERY = re.compile(
    r"([?&;](?:[\w.-]*[_.-])?(?:key|token|secret|password|passwd|pwd|signature|sig|credential)s?=)[^&;\s'\"#]+", re.I
)
_FORMATS = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA)[A-Za-z0-9_-]{16,}")
"""Of tokens that say what they are."""
_PAIR = re.compile(
    r"((?:(?:api|access|auth|private|secret|hf|hub|bearer|refresh)[_-]?(?:key|token)|password|passwd|secret)"
    r"['\"]?\s*[:=]\s*)[^\s,}&\]]+",
    re.I,
)
_BEARER = re.compile(
    r"\b(authorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)?\s*)[^\s,'\"}\]]+"
    r"|\b(bearer\s+)[\w.~+/=-]{16,}",
    re.I,
)
_SHORTEST = 6  # a shorter value of a variable would hide parts of ordinary words
_SHORTEST_PART = 12  # within a value that is stored, and read again


@cache
def is_secret(name: str) -> bool:
    """Return whether a key, an argument or a variable of this name probably holds a secret."""
    return bool(_SECRET.search(name)) and not _HARMLESS.search(name)


def redacted(value: Any, name: str = "") -> Any:
    """Return a tree of mappings and lists to be shown: as `concealed`, and without what texts say after `password:` or
    so.
    """
    return _tree(value, name, lambda text: _without_pairs(_concealed(text)))


def concealed(value: Any, name: str = "") -> Any:
    """Return a tree to be stored: without values of secret names, without logins and secrets in addresses, and without
    values of this process's secret variables. Other texts stay as they are.
    """
    return _tree(value, name, _concealed)


def conceals(value: Any) -> bool:
    """Return whether `concealed` has replaced this value, or a login or a secret of an address in it."""
    return isinstance(value, str) and (value == HIDDEN or f"://{HIDDEN}@" in value or f"={HIDDEN}" in value)


def _tree(value: Any, name: str, text: Callable[[str], str]) -> Any:
    if value is not None and not isinstance(value, bool) and is_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: _tree(item, str(key), text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tree(item, "", text) for item in value]
    return text(value) if isinstance(value, str) else value


def _concealed(text: str) -> str:
    for value in _secret_values():
        if text == value or len(value) >= _SHORTEST_PART:
            text = text.replace(value, HIDDEN)
    return _without_formats(text)


def redacted_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command line, to be shown or stored."""
    shown = []
    for word in words:
        key, equals, value = word.partition("=")
        shown.append(f"{key}={redacted(value, key)}" if equals and "://" not in key else redacted(word))
    return shown


def secrets_in(value: Any, name: str = "") -> Iterator[str]:
    """Dotted names below `value` that hold a secret."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from secrets_in(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from secrets_in(item, f"{name}.{index}")
    elif value is not None and redacted(value, name.rpartition(".")[2]) != value:
        yield name


def hidden(text: str) -> str:
    """Return a text without the values of this process's secret variables, and without secrets that can be
    recognised.
    """
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    return _without_pairs(_without_formats(text))


def _secret_values() -> Iterator[str]:
    return (value for name, value in os.environ.items() if len(value) >= _SHORTEST and is_secret(name))


def _without_pairs(text: str) -> str:
    return _PAIR.sub(rf"\1{HIDDEN}", _BEARER.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text))


def _without_formats(text: str) -> str:
    return _FORMATS.sub(HIDDEN, _QUERY.sub(rf"\1{HIDDEN}", _LOGIN.sub(rf"\1{HIDDEN}@", text)))


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
