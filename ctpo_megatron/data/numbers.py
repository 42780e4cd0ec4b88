"""Numbers of data files as text: their digits follow from the type they were stored in, never from the value."""

from __future__ import annotations

import math
import sys
from decimal import Decimal, InvalidOperation

import numpy as np
import pyarrow as pa

FloatType = type[np.floating]
"""The floating-point type that a number was stored in."""
LONGEST = 100_000
"""Digits of a number; 1e999999999 would have more than fit into memory."""
_SHORT = 12
"""Digits of a number that a computation missed. One double in 2,000 is as near to such a number by chance."""
_MISSED = 4
"""Units of the last place that a computation misses it by."""


def number_text(value: float | Decimal, stored: FloatType = np.float64) -> str:
    """Return a number in decimal digits without an exponent: 1e-05 is "0.00001", and 72.0 is "72".

    stored: its type, of which the shortest digits are written: 0.1 of a float32 column is "0.1". What a computation
    leaves in the last places of a float64 is left out: 0.30000000000000004 is "0.3". Raises ValueError for a number
    that is not finite or has more than `LONGEST` digits.
    """
    exact = _shortest(value, stored) if isinstance(value, float) and math.isfinite(value) else Decimal(value)
    if not exact.is_finite():
        raise ValueError(f"must be a finite number, not {value}")
    if max(abs(exact.adjusted()), len(exact.as_tuple().digits)) > LONGEST:
        raise ValueError(f"must have at most {LONGEST:,} digits")
    return format(exact, "f")


def number_warning(value: object, stored: FloatType) -> str:
    """That a number has all digits that its type is sure of, so that it may have been another one; else ""."""
    if not isinstance(value, float) or not math.isfinite(value):
        return ""
    if value.is_integer() and abs(value) <= 2.0 ** (np.finfo(stored).nmant + 1):
        return ""
    text, sure = number_text(value, stored), np.finfo(stored).precision
    count = len(Decimal(text).normalize().as_tuple().digits)
    if count < sure:
        return ""
    return (
        f"the number has {count} digits ({text}), and {stored.__name__} is sure of {sure}: only an answer with all of "
        "them is right; if fewer are meant, or it was another number, write it as text"
    )


def precision_of(schema: pa.Schema | None, column: str, *fields: str) -> FloatType:
    """Return the type of the numbers in a column, or in a field of its records. float64: of JSON, and where they are
    none.
    """
    if schema is None:
        return np.float64
    kind: pa.DataType = pa.struct(list(schema))
    for name in (column, *fields):
        index = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
        if index < 0:
            return np.float64
        kind = _plain(kind.field(index).type)
    precision: FloatType = kind.to_pandas_dtype() if pa.types.is_floating(kind) else np.float64
    return precision


def json_integer(text: str) -> int | Decimal:
    """Return a whole number of JSON, which may have more digits than int() reads."""
    return int(text) if len(text) <= sys.int_info.default_max_str_digits else Decimal(text)


def json_number(text: str) -> float | Decimal:
    """Any other number of JSON: a float, or a Decimal where no float has the same digits; NaN for beyond both."""
    value = float(text)
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent of 19 digits
        return math.nan
    return value if Decimal(repr(value)) == exact else exact


def _shortest(value: float, stored: FloatType) -> Decimal:
    if value.is_integer():
        return Decimal(repr(value + 0.0)).to_integral_value()  # of -0.0, no sign
    if stored is not np.float64:
        return Decimal(str(stored(value)))
    near = float(f"{value:.{_SHORT}g}")
    if abs(value - near) > _MISSED * math.ulp(value):
        return Decimal(repr(value))
    return _shortest(near, stored) if near.is_integer() else Decimal(repr(near))


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values, of a dictionary for instance."""
    while inner := getattr(kind, "value_type", getattr(kind, "storage_type", None)):
        kind = inner
    return kind
