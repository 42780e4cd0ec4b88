"""`ctpo` called in the test's own process: the fixture `invoke` of tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    """What a call of `ctpo` ended with: its exit status, and the text of both outputs."""

    status: int | str | None
    out: str
    err: str


Invoke = Callable[..., Result]
"""Takes the words after `ctpo`."""
