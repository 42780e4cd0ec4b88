"""Inequalities and intervals as sets of numbers: `|x|<3`, `-3<x<3` and `(-3,3)` are one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ctpo_answers import expressions
from ctpo_answers.closed_forms import same_number
from ctpo_answers.expressions import latex
from ctpo_answers.reading import INEQUALITY
from ctpo_answers.readings import Formula, Named, Quantity, Reading, Several

_COMPLEX = "zw"
"""Variables that are taken for complex numbers within an absolute value: `|z|<2` is a disc."""
_SIZE_OF_COMPLEX = re.compile(rf"\|[^|]*(?<![A-Za-z\\])[{_COMPLEX}](?![A-Za-z])[^|]*\|")
_Span = tuple[Any, Any, bool, bool]
"""Ends of an interval, and whether each is left out."""


@dataclass(frozen=True, slots=True)
class _Region:
    """numbers: a set of sympy. name: of the variable that is in it; "" where none is said."""

    numbers: Any
    name: str = ""


def same_region(gold: Reading, said: Reading) -> bool | None:
    """Return whether inequalities of one variable have the same solutions as others, or are true in the same intervals.

    Each may have the absolute value of something linear. None where neither side has an inequality, or where it cannot
    be told. Raises any exception of sympy.
    """
    with_inequality = [_has_inequality(side) for side in (gold, said)]
    if not any(with_inequality):
        return None
    one, other = _region(gold), _region(said)
    if one is None or other is None:
        is_disc = not all(with_inequality) and any(_SIZE_OF_COMPLEX.search(str(side)) for side in (gold, said))
        return False if is_disc else None
    if one.name and other.name and one.name != other.name:
        return False
    pieces, others = _pieces(one.numbers), _pieces(other.numbers)
    if pieces is None or others is None:
        return None
    return len(pieces) == len(others) and all(map(_same_piece, pieces, others))


def _has_inequality(reading: Reading) -> bool:
    if isinstance(reading, Several):
        return any(map(_has_inequality, reading.items))
    return isinstance(reading, Formula) and bool(INEQUALITY.search(reading.text))


def _region(reading: Reading) -> _Region | None:
    if isinstance(reading, Named):
        value = _region(reading.value)
        return _Region(value.numbers, reading.name.removeprefix("\\")) if value else _point(reading)
    if isinstance(reading, Several):
        return _joined(reading) if reading.brackets in ("", "|") else _interval(reading)
    return _of_expression(expressions.parse(reading.text)) if isinstance(reading, Formula) else None


def _point(named: Named) -> _Region | None:
    from sympy import FiniteSet, Rational

    value = named.value.value if isinstance(named.value, Quantity) else None
    if not isinstance(value, Fraction):
        return None
    return _Region(FiniteSet(Rational(value.numerator, value.denominator)), named.name.removeprefix("\\"))


def _interval(several: Several) -> _Region | None:
    from sympy import Interval

    ends = [expressions.parse(latex(item)) for item in several.items]
    if len(ends) != 2 or several.brackets not in ("()", "[]", "(]", "[)"):
        return None
    if not all(end is not None and end.is_extended_real and end.is_number for end in ends) or not ends[0] < ends[1]:
        return None
    return _Region(Interval(*ends, several.brackets[0] == "(", several.brackets[1] == ")"))


def _joined(several: Several) -> _Region | None:
    """Of several inequalities with `or` between any may hold, else all must; if they cannot, `or` is meant."""
    from sympy import EmptySet, Intersection, Union

    parts = [_region(item) for item in several.items]
    regions = [part for part in parts if part is not None]
    names = {region.name for region in regions} - {""}
    if len(regions) < len(parts) or len(names) > 1:
        return None
    numbers = [region.numbers for region in regions]
    all_hold = EmptySet if several.brackets == "|" else Intersection(*numbers)
    return _Region(Union(*numbers) if all_hold == EmptySet else all_hold, "".join(names))


def _of_expression(expression: Any) -> _Region | None:
    from sympy import And, Intersection, Set
    from sympy.core.relational import Relational

    if isinstance(expression, Set):
        return _Region(expression)
    if isinstance(expression, And):
        parts = [_of_expression(each) for each in expression.args]
        regions = [part for part in parts if part is not None]
        if len(regions) < len(parts) or len({region.name for region in regions}) > 1:
            return None
        return _Region(Intersection(*(region.numbers for region in regions)), regions[0].name)
    return _solved(expression) if isinstance(expression, Relational) else None


def _solved(relation: Any) -> _Region | None:
    """The solutions of an inequality that is linear in a variable, or in an absolute value of something linear."""
    from sympy import Abs, Dummy, Eq, FiniteSet, Intersection, Interval, Ne, S, Union, oo

    difference = relation.lhs - relation.rhs
    symbols, sizes = difference.free_symbols, difference.atoms(Abs)
    if len(symbols) != 1 or len(sizes) > 1 or isinstance(relation, Eq):
        return None
    (symbol,), size = symbols, Dummy(real=True)
    variable = size if sizes else symbol
    line = _line(difference.subs(dict.fromkeys(sizes, size)), variable)
    if line is None or (sizes and symbol.name[0] in _COMPLEX):
        return None
    slope, bound = line[0], -line[1] / line[0]
    if isinstance(relation, Ne):
        numbers = S.Reals - FiniteSet(bound)
    elif (relation.gts == relation.lhs) == bool(slope > 0):
        numbers = Interval(bound, oo, relation.rel_op in "<>", True)
    else:
        numbers = Interval(-oo, bound, True, relation.rel_op in "<>")
    if not sizes:
        return _Region(numbers, symbol.name)
    inner = _line(next(iter(sizes)).args[0], symbol)
    pieces = _pieces(Intersection(numbers, Interval(0, oo)))
    if inner is None or pieces is None:
        return None
    mapped = [_mapped(piece, sign / inner[0], -inner[1] / inner[0]) for piece in pieces for sign in (1, -1)]
    return _Region(Union(*(Interval(*piece) for piece in mapped)), symbol.name)


def _line(expression: Any, variable: Any) -> tuple[Any, Any] | None:
    """a and b of an expression a * variable + b of real numbers; None for any other one."""
    slope, rest = expression.expand().diff(variable), expression.subs(variable, 0)
    if not slope.is_number or not rest.is_number or not slope.is_real or not rest.is_real or slope.is_zero:
        return None
    return slope, rest


def _mapped(piece: _Span, factor: Any, offset: Any) -> _Span:
    start, end, start_open, end_open = piece
    start, end = start * factor + offset, end * factor + offset
    return (start, end, start_open, end_open) if factor > 0 else (end, start, end_open, start_open)


def _pieces(numbers: Any) -> list[_Span] | None:
    """The intervals of a set in their order; None for a set of another kind."""
    from sympy import FiniteSet, Interval, Union

    if isinstance(numbers, Interval):
        return [(numbers.start, numbers.end, bool(numbers.left_open), bool(numbers.right_open))]
    if isinstance(numbers, FiniteSet):
        points = [each for each in numbers.args if each.is_number and each.is_real]
        return [(each, each, False, False) for each in sorted(points)] if len(points) == len(numbers.args) else None
    if numbers.is_empty:
        return []
    parts = [_pieces(part) for part in numbers.args] if isinstance(numbers, Union) else [None]
    found = [piece for part in parts if part is not None for piece in part]
    return sorted(found, key=lambda piece: float(piece[0])) if None not in parts else None


def _same_piece(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return one[2:] == other[2:] and all(map(_same_end, one[:2], other[:2]))


def _same_end(one: Any, other: Any) -> bool:
    return bool(one == other) or bool(one.is_finite and other.is_finite and same_number(one, other))
