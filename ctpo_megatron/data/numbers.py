"""Numbers of data files as text."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np

_DOUBLE = 16
"""Digits from which on a number of a column of single precision shows how it was widened."""


def number_text(value: float | Decimal) -> str:
    """A number in decimal digits without an exponent, exactly as Python would read it back: 1e-05 is "0.00001".

    A value of single precision is written with its own digits: 0.1 of a float32 column is "0.1". Raises ValueError for
    a number that is not finite.
    """
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, not {value}")
    exact = value if isinstance(value, Decimal) else Decimal(repr(value))
    if (
        isinstance(value, float)
        and len(exact.as_tuple().digits) >= _DOUBLE
        and float(single := np.float32(value)) == value
    ):
        exact = Decimal(str(single))
    return format(exact, "f")
