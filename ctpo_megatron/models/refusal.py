"""Why a model is not supported, and tests of numbers for such checks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """What is not supported in a config.json, and what is."""

    message: str
    fix: str = ""


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_count(value: Any) -> bool:
    """Whether it is an integer above 0."""
    return isinstance(value, int) and is_positive(value)
