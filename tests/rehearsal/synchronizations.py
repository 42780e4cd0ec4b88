"""Counts the places where the host waits for the device, by the phase of training that they happen in."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_OURS = ("ctpo_megatron", "ctpo_kernels")
_THEIRS = ("megatron", "vllm")


@dataclass(frozen=True)
class Synchronization:
    """ours: caused by a line of this project, not by one of megatron-core's. where: that line."""

    phase: str
    what: str
    where: str
    ours: bool


class _State:
    """Of this process."""

    phase = ""
    counts: ClassVar[Counter[Synchronization]] = Counter()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """What is counted within belongs to this phase."""
    before, _State.phase = _State.phase, name
    try:
        yield
    finally:
        _State.phase = before


def current() -> str:
    """The phase that is under way."""
    return _State.phase


def count(what: str) -> None:
    """The host waits for the device now."""
    package, line = _cause()
    _State.counts[Synchronization(_State.phase, what, line, package in _OURS)] += 1


def refuse_pageable() -> None:
    """Memory that is not pinned is copied, `non_blocking`. Raises AssertionError but for other people's libraries."""
    package, line = _cause()
    if package not in _THEIRS:
        raise AssertionError(f"{line}: a copy that is non_blocking needs pinned memory, or the host waits for it")
    count("to cuda, from pageable memory")


def _cause() -> tuple[str, str]:
    """The nearest package that this looks for, and the line of it."""
    frame = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if package := next((part for part in parts if part in (*_OURS, *_THEIRS)), ""):
            return package, f"{'/'.join(parts[parts.index(package) :])}:{frame.f_lineno}"
        frame = frame.f_back
    return "", "elsewhere"


def counted() -> Counter[Synchronization]:
    """Everything so far; counts begin anew."""
    found, _State.counts = _State.counts, Counter()
    return found
