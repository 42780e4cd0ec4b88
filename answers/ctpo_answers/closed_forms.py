"""Numbers in closed form: their exact values, within bounds, and whether two are equal."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

_BITS = 1_000_000
"""Of the largest integer that is computed."""
_TERMS = 10_000
"""Of the longest finite sum or product that is computed."""
_DEGREE = 5_000
"""Largest exponent over an expression with variables."""
_SHARE = Fraction(1, 10**6)
"""A decimal equals a number without a finite decimal if they differ by less than this share of the number."""
_DIGITS = 400
"""In which two irrational numbers are compared."""
_NOISE = Fraction(1, 10**300)
"""Share below which a difference of irrational numbers is the error of its evaluation."""


class UncomputableError(ValueError):
    """A number or a formula is too large to be computed."""


def ends(value: Fraction) -> bool:
    """Return whether the number can be written as a decimal."""
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


def rounds(decimal: Fraction, value: Fraction) -> bool:
    """Return whether a decimal is a fraction without a finite decimal, up to a millionth of its value."""
    return not ends(value) and abs(decimal - value) < _SHARE * abs(value)


def same_number(gold: Any, said: Any) -> bool | None:
    """Return whether two expressions of sympy are the same number; None where one of them is not a number.

    Rational numbers are compared exactly, irrational ones in 400 digits. Where only one side is a decimal, a millionth
    of the other may be missing. Raises UncomputableError for what `reduced` cannot compute, and ValueError for a `gold`
    without a value, such as 1/0.
    """
    from sympy import Expr, Float, Rational, nan, zoo
    from sympy.concrete.expr_with_limits import ExprWithLimits

    if not all(isinstance(side, Expr) and side.is_number for side in (gold, said)):
        return None
    sides = [reduced(side) for side in (gold, said)]
    if sides[0].has(zoo, nan):
        raise ValueError(f"{gold} has no value")
    if sides[0] == sides[1]:
        return True
    if any(side.has(ExprWithLimits) for side in sides):
        return None
    if sides[0].is_finite is False or sides[1].is_finite is False:
        return False
    rational = [Fraction(int(side.p), int(side.q)) if isinstance(side, Rational) else None for side in sides]
    finite = [value is not None and ends(value) for value in rational]
    decimal = [is_finite and side.has(Float) for is_finite, side in zip(finite, (gold, said), strict=True)]
    if finite[0] == finite[1] or not any(decimal):
        if None not in rational:
            return False
        share = _NOISE
    else:
        share = _SHARE
    difference = (sides[0] - sides[1]).evalf(30, maxn=_DIGITS)
    size = sides[0 if decimal[1] else 1].evalf(30, maxn=_DIGITS)
    if not all(part.is_Number for side in (difference, size) for part in side.as_real_imag()):
        return None
    return bool(abs(difference) < Rational(share.numerator, share.denominator) * abs(size))


def reduced(expression: Any) -> Any:
    """Return the expression with its rational parts as exact numbers; decimals are read as they are written.

    Raises UncomputableError for integers of more than a million bits, sums of more than 10,000 terms, and powers above
    5,000 of what has variables.
    """
    from sympy import Basic, Expr, Float, MatrixBase, Rational, UnevaluatedExpr

    if isinstance(expression, MatrixBase):
        return expression.applyfunc(reduced)
    if isinstance(expression, Float):
        return Rational(str(expression))
    if not isinstance(expression, Basic) or not expression.args:
        return expression
    if isinstance(expression, UnevaluatedExpr):
        return reduced(expression.args[0])
    parts = [reduced(part) for part in expression.args]
    if not isinstance(expression, Expr):
        return expression
    return _evaluated(expression, parts)


def _evaluated(expression: Any, parts: list[Any]) -> Any:
    from sympy import E, Product, Sum, binomial, exp, factorial, factorial2
    from sympy.concrete.expr_with_limits import ExprWithLimits

    if isinstance(expression, exp):
        _check_power(E, parts[0])
    elif expression.is_Pow:
        _check_power(*parts)
    elif isinstance(expression, factorial | factorial2):
        _check_bits(parts[0], parts[0])
    elif isinstance(expression, binomial):
        chosen = min(parts[1], parts[0] - parts[1]) if all(part.is_Integer for part in parts) else parts[1]
        _check_bits(parts[0], chosen)
    elif expression.is_Mul:
        if sum(map(_bits, parts)) > _BITS:
            raise UncomputableError("a product of more than a million bits")
    elif isinstance(expression, Sum | Product):
        _check_terms(expression)
        return expression.doit()
    if isinstance(expression, ExprWithLimits):
        return expression
    return expression.func(*parts)


def _check_power(base: Any, exponent: Any) -> None:
    size = abs(exponent)
    if not size.is_number:
        return
    if not base.is_number:
        if exponent.is_Rational and size > _DEGREE:
            raise UncomputableError(f"a power of {exponent}")
    elif not size.is_Rational:
        size = size.evalf(5)
    if base.is_number and size.is_comparable and size * max(_bits(base), 1) > _BITS and base not in (0, 1, -1):
        raise UncomputableError("a power of more than a million bits")


def _check_bits(largest: Any, factors: Any) -> None:
    """Raise UncomputableError for a product of `factors` integers up to `largest` that is too long."""
    if not largest.is_number or not factors.is_number:
        return
    count, size = factors.evalf(15), largest.evalf(15)
    if count.is_comparable and size.is_comparable and count * math.log2(max(size, 2)) > _BITS:
        raise UncomputableError("an integer of more than a million bits")


def _check_terms(expression: Any) -> None:
    """Raise UncomputableError for too many terms, or where the first or the last one cannot be computed."""
    for symbol, *bounds in expression.limits:
        first, last = (reduced(bound) for bound in bounds)
        if first.is_Integer and last.is_Integer and last - first > _TERMS:
            raise UncomputableError(f"{last - first} terms")
        for bound in (first, last):
            if bound.is_Integer:
                reduced(expression.function.subs(symbol, bound))


def _bits(number: Any) -> int:
    """Of the longest integer in an expression."""
    from sympy import Rational

    return max((max(abs(int(each.p)), int(each.q)).bit_length() for each in number.atoms(Rational)), default=1)
