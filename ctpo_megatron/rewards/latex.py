"""Readings as LaTeX, for math-verify."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

from ctpo_megatron.rewards.reading import Formula, Named, Quantity, Reading, Several

_LONGEST_DECIMAL = 1000
"""Digits of a number that is compared with a formula."""


def latex(value: Reading | Fraction) -> str:
    """A reading, without the units in it."""
    if isinstance(value, Fraction):
        return _number(value)
    if isinstance(value, Formula):
        return str(value)
    if isinstance(value, Quantity):
        return latex(value.value)
    if isinstance(value, Named):
        return f"{value.name}={latex(value.value)}"
    if isinstance(value, Several):
        inner = (":" if value.brackets in (":", "clock") else ", ").join(map(latex, value.items))
        if len(value.brackets) != 2:
            return inner
        opening, closing = ("\\{", "\\}") if value.brackets == "{}" else tuple(value.brackets)
        return f"{opening}{inner}{closing}"
    return str(value)


def ends(value: Fraction) -> bool:
    """Whether the number can be written as a decimal."""
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


def _number(value: Fraction) -> str:
    """As a decimal where it is one: math-verify compares it with a formula by its first decimals."""
    if value.denominator > 1 and ends(value):
        with localcontext(prec=_LONGEST_DECIMAL):
            return f"{Decimal(value.numerator) / value.denominator:f}"
    sign, above = "-" if value < 0 else "", abs(value.numerator)
    return f"{sign}{above}" if value.denominator == 1 else f"{sign}\\frac{{{above}}}{{{value.denominator}}}"
