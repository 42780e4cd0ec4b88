"""Exact values of written numbers: decimals, fractions, mixed and repeating ones, powers of ten."""

from __future__ import annotations

import re
from fractions import Fraction

_LARGEST_EXPONENT = 999

_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?\s*{_DECIMAL}"
_TIMES_TEN = r"(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+)|\(\s*([+-]?\d+)\s*\))"
_REPEATING = r"(?P<whole>\d*)\.(?P<fixed>\d*)(?:\\overline\s*\{\s*(?P<bar>\d+)\s*\}|\((?P<round>\d+)\))"
_DOTTED = r"(?P<dwhole>\d*)\.(?P<dfixed>\d*)(?P<dots>\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?)"
_GOES_ON = r"(?P<shown>\d*\.\d+)\s*\\ldots"
_FRACTION = rf"\\frac\s*\{{\s*({_SIGNED})\s*\}}\s*\{{\s*({_SIGNED})\s*\}}"
_FORMS = tuple(
    re.compile(form)
    for form in (
        _REPEATING,
        _DOTTED,
        _GOES_ON,
        rf"(?P<mixed>\d+)\s*{_FRACTION}",
        r"(?P<mixed>\d+) (\d+)\s*/\s*(\d+)",
        _FRACTION,
        rf"({_DECIMAL})\s*/\s*({_DECIMAL})",
        rf"(?P<factor>{_DECIMAL})\s*{_TIMES_TEN}",
        r"(?P<factor>)10\s*\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+)|\(\s*([+-]?\d+)\s*\))",
        rf"(?P<mantissa>{_DECIMAL})[eE](?P<exponent>[+-]?\d+)",
        rf"(?P<decimal>{_DECIMAL})",
    )
)
_SIGN = re.compile(r"\s*([+-]?)\s*")
_BRACED = re.compile(r"\{(\d+)\}")


def numeral(text: str) -> tuple[Fraction, int] | None:
    """The exact value of the number that a text begins with, and where it ends; None where none begins."""
    sign = _SIGN.match(text)
    start = sign.end() if sign else 0
    for form in _FORMS:
        if found := form.match(text, start):
            value = _value(found)
            if value is not None:
                return (-value if sign and sign[1] == "-" else value), found.end()
    return None


def _value(found: re.Match[str]) -> Fraction | None:
    groups = found.groupdict()
    if "bar" in groups:
        return _repeating(groups["whole"], groups["fixed"], groups["bar"] or groups["round"])
    if "dots" in groups:
        return _repeating(groups["dwhole"], groups["dfixed"], re.sub(r"\D", "", groups["dots"]))
    if "shown" in groups:
        return _going_on(groups["shown"])
    if "mantissa" in groups:
        return _scaled(Fraction(groups["mantissa"]), groups["exponent"])
    if "factor" in groups:
        return _scaled(Fraction(groups["factor"] or 1), next(each for each in found.groups()[1:] if each))
    if "decimal" in groups:
        return Fraction(groups["decimal"])
    above, below = (Fraction(part.replace(" ", "")) for part in found.groups()[-2:])
    if not below:
        return None
    if "mixed" not in groups:
        return above / below
    return int(groups["mixed"]) + above / below if 0 <= above < below else None


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    """`whole`.`fixed``period``period`... ."""
    nines = (10 ** len(period) - 1) * 10 ** len(fixed)
    return Fraction(int(whole + fixed + period or "0") - int(whole + fixed or "0"), nines)


def _going_on(shown: str) -> Fraction | None:
    """A decimal with `...` after it. Its shortest period continues, if it stands there three times or twice."""
    whole, _, places = shown.partition(".")
    for length in range(1, len(places) // 2 + 1):
        period, times = places[-length:], 3 if length == 1 else 2
        if places.endswith(period * times):
            return _repeating(whole, places[:-length], period)
    return None


def _scaled(factor: Fraction, exponent: str) -> Fraction | None:
    power = int(exponent.replace(" ", ""))
    return factor * Fraction(10) ** power if abs(power) <= _LARGEST_EXPONENT else None
