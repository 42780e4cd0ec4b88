"""Keeps secrets out of everything a run prints or writes: the names that hold them, and texts without them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"(^|[._-])(api|access|private|secret|auth|bearer|refresh|hf|hub)[_-]?(key|token|secret)s?$"
    r"|(^|[._-])(key|token|secret|password|passwd|passphrase|credentials?)$",
    re.IGNORECASE,
)
# `eos_token`, `sort_key` and their like say nothing about secrets.
_HARMLESS = re.compile(
    r"(^|[._-])(eos|bos|pad|stop|start|end|sep|unk|mask|call|tool|sort|best|prompt)_(token|key)$", re.I
)
_LOGIN = re.compile(r"(://)[^/\s:@'\"]*:[^/\s@'\"]+@")
_PAIR = re.compile(
    r"((?:(?:api|access|auth|private|secret)[_-]?(?:key|token)|password|passwd|secret)['\"]?\s*[:=]\s*)[^\s,}\]]+", re.I
)
_SHORTEST = 6  # a shorter value of a variable would hide parts of ordinary words


def is_secret(name: str) -> bool:
    """Whether a key, an argument or a variable of this name probably holds a secret."""
    return bool(_SECRET.search(name)) and not _HARMLESS.search(name)


def redacted(value: Any, name: str = "") -> Any:
    """A tree of mappings and lists without the values of secret names and without logins in addresses."""
    if value is not None and is_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return _without_pairs(value) if isinstance(value, str) else value


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
    """A text without the values of this process's secret variables and without logins in addresses."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and is_secret(name):
            text = text.replace(value, HIDDEN)
    return _without_pairs(text)


def _without_pairs(text: str) -> str:
    return _PAIR.sub(rf"\1{HIDDEN}", _LOGIN.sub(rf"\1{HIDDEN}@", text))
