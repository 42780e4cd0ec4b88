"""math-verify, with its errors fixed: writes readings as LaTeX, reads a formula, and says whether two are equal.

Each of the errors has a test in answers/tests/test_math_verify.py that fails once it is fixed there.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ctpo_answers.closed_forms import UncomputableError, reduced, same_number
from ctpo_answers.layout import LONGEST, is_product
from ctpo_answers.readings import Formula, Named, Quantity, Reading, Several

_IMAGINARY = re.compile(r"(?<![A-Za-z\\{_])i(?![A-Za-z])|(?<=\d)i(?![A-Za-z])|(?<=\{)i(?![A-Za-z}])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[A-Za-z]|\\[a-z]+)\s*\^\\circ(?![a-z])")
_FACTORIAL = re.compile(r"^([^=<>]+!)=([^=<>]+)$")
"""An equation that is read as `n \\ne 120` unless the factorial stands on its right side."""
_DIFFERENTIAL = re.compile(r"(?<![A-Za-z\\])[abc]*d[abcd]+(?![A-Za-z])")
"""A product in which math-verify takes `dc` for one variable."""
_BARE_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|max|min|gcd)(?![A-Za-z])"
)
"""Else it would be a product of letters."""
_POWER_OF_FACTORIAL = re.compile(r"((?:\d+|(?<![A-Za-z])[A-Za-z])!)\s*\^")
"""Not in the grammar."""
_ARGUMENT = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log))\s*(\\[a-z]+|[A-Za-z])\s*\\cdot(?![a-z])")
"""A letter whose function ends with it; math-verify takes what follows `\\cdot` into the argument."""
_LONGEST_DECIMAL = 1000
"""Digits of a number that is compared with a formula."""


def latex(value: Reading | Fraction) -> str:
    """Return a reading, without the units in it."""
    if isinstance(value, Fraction):
        return _number(value)
    if isinstance(value, Formula):
        return str(value)
    if isinstance(value, Quantity):
        return _decimal(value.value) if value.decimal and isinstance(value.value, Fraction) else latex(value.value)
    if isinstance(value, Named):
        return f"{value.name}={latex(value.value)}"
    if isinstance(value, Several):
        inner = (":" if value.brackets in (":", "clock") else ", ").join(map(latex, value.items))
        if len(value.brackets) != 2:
            return inner
        opening, closing = ("\\{", "\\}") if value.brackets == "{}" else tuple(value.brackets)
        return f"{opening}{inner}{closing}"
    return str(value)


def _number(value: Fraction) -> str:
    sign, above = "-" if value < 0 else "", abs(value.numerator)
    return f"{sign}{above}" if value.denominator == 1 else f"{sign}\\frac{{{above}}}{{{value.denominator}}}"


def _decimal(value: Fraction) -> str:
    with localcontext(prec=_LONGEST_DECIMAL):
        return f"{Decimal(value.numerator) / value.denominator:f}"


def parse(text: str) -> Any:
    """Return the expression of LaTeX text as a sympy object; None for text that cannot be read.

    It can take long: run it in a process that can be killed.
    """
    complex_numbers = bool(_IMAGINARY.search(text))
    return _parsed(_IMAGINARY.sub(" i ", text), complex_numbers)


def equal(gold: str, said: str) -> bool:
    """Return whether two formulas are equal; False where one cannot be read, and where `said` is too large to be
    computed.

    Numbers are compared by their values (`same_number`), other formulas by math-verify. Not symmetric: a relation may
    be said for a set, and an equation for the value on its right side. Raises UncomputableError for a `gold` that is
    too large, and any exception of math-verify's comparison.
    """
    from math_verify import verify
    from sympy import Eq, Ne

    if len(said) > max(LONGEST, 2 * len(gold)):
        return False
    complex_numbers = bool(_IMAGINARY.search(gold) or _IMAGINARY.search(said))
    one, other = (_parsed(_IMAGINARY.sub(" i ", text), complex_numbers) for text in (gold, said))
    if one is None or other is None:
        return False
    if not _computable(one, other):
        return False
    if isinstance(one, Ne) and isinstance(other, Ne):  # math-verify compares these with an error
        one, other = Eq(one.lhs, one.rhs, evaluate=False), Eq(other.lhs, other.rhs, evaluate=False)
    if _is_equation(one) and _is_equation(other) and (found := _same_equation(one, other)) is not None:
        return found
    if _is_equation(one) != _is_equation(other):
        one, other = _value(one, of_gold=True), _value(other, of_gold=False)
        if one is None or other is None:
            return False
    if (found := same_number(one, other)) is not None:
        return found
    found = verify(one, other, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True)
    return bool(found) and not _differ(one, other)


def integers(expression: Any) -> Counter[int]:
    """Return how often each integer stands in an expression, indices of symbols included, without signs."""
    from sympy import MatrixBase, Rational, Symbol, preorder_traversal

    parts = list(expression) if isinstance(expression, MatrixBase) else [expression]
    nodes = [each for part in parts for each in preorder_traversal(part)]
    found = Counter(abs(int(part)) for each in nodes if isinstance(each, Rational) for part in (each.p, each.q))
    found.update(int(index) for each in nodes if isinstance(each, Symbol) for index in re.findall(r"\d+", each.name))
    return found


def _computable(gold: Any, said: Any) -> bool:
    reduced(gold)
    try:
        reduced(said)
    except UncomputableError:
        return False
    return True


def _differ(one: Any, other: Any) -> bool:
    """Whether two formulas that math-verify calls equal differ in a number: it rounds their coefficients."""
    from sympy import Eq, Expr, MatrixBase, Rational

    one, other = (side.rhs if isinstance(side, Eq) else side for side in (one, other))
    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase) and one.shape == other.shape:
        return any(same_number(*pair) is False for pair in zip(one, other, strict=True))
    if not isinstance(one, Expr) or not isinstance(other, Expr) or one.free_symbols != other.free_symbols:
        return False
    symbols = sorted(one.free_symbols, key=str)
    points = [{symbol: Rational(start + index, 7) for index, symbol in enumerate(symbols)} for start in (2, 300)]
    return all(same_number(one.xreplace(point), other.xreplace(point)) is False for point in points)


def _is_equation(expression: Any) -> bool:
    """Whether it is `a = b`, or a chain `a = b = c`."""
    from sympy import And, Eq

    return isinstance(expression, Eq) or (
        isinstance(expression, And) and all(isinstance(each, Eq) for each in expression.args)
    )


def _value(expression: Any, of_gold: bool) -> Any:
    """What an equation says to be the answer: its right side. None where it says none.

    A ground truth must have one variable, or an unknown function such as `f(x)`, on its left side: `\\sin x = 1` is to
    be solved. An answer may have a formula there, but must not leave an equation to be solved, such as `2x = 12`.
    """
    from sympy import Derivative, Eq, Function, Limit, Symbol
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.core.function import AppliedUndef

    if not _is_equation(expression):
        return expression
    chain = [expression] if isinstance(expression, Eq) else expression._unsorted_args
    left, right = chain[0].lhs, chain[-1].rhs
    function = AppliedUndef if of_gold else Function
    if isinstance(left, Symbol | Derivative | Limit | ExprWithLimits | function):
        return right
    unknowns = left.free_symbols
    if not unknowns:
        return right if left == right or _zero(left - right) else None
    return None if of_gold or (len(unknowns) == 1 and left.is_polynomial()) else right


def _same_equation(gold: Any, said: Any) -> bool | None:
    """Whether an equation is another one times a number, or with its sides swapped; None where it cannot be told."""
    from sympy import Eq, Expr, Symbol, cancel

    if not isinstance(gold, Eq) or not isinstance(said, Eq):
        return None
    if not all(isinstance(side, Expr) for side in (*gold.args, *said.args)):
        return None
    one, other = (_exact(side.lhs - side.rhs) for side in (gold, said))
    if not one.free_symbols or not other.free_symbols:
        return bool(_zero(one) and _zero(other) and _zero(_exact(gold.rhs - said.rhs)))
    if one.free_symbols != other.free_symbols:
        return False
    factor = cancel(one / other)
    if not factor.is_number or not factor.is_finite or factor.is_zero:
        return None
    solved = isinstance(gold.lhs, Symbol) and gold.rhs.is_number
    return not solved or abs(factor) == 1


def _exact(expression: Any) -> Any:
    from sympy import Float, Rational

    return expression.xreplace({each: Rational(str(each)) for each in expression.atoms(Float)})


def _zero(expression: Any) -> bool:
    return bool(expression.equals(0))


@lru_cache(maxsize=256)
def _parsed(text: str, complex_numbers: bool) -> Any:
    _mend()
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
    from math_verify.parser import get_last_eq
    from sympy import I, Integer

    if text.isdecimal():  # the grammar takes seconds for thousands of digits
        return Integer(text)

    # Its list of units takes variables for units (`3t`), and its symbols would lose their case (`A`, `a`).
    layout = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    text = _FACTORIAL.sub(r"\2=\1", text)
    text = _DIFFERENTIAL.sub(lambda run: "(" + ")(".join(run[0]) + ")" if is_product(run[0]) else run[0], text)
    text = _BARE_FUNCTION.sub(r"\\\1 ", text)
    text = _POWER_OF_FACTORIAL.sub(r"(\1)^", _ARGUMENT.sub(r"\1(\2)\\cdot ", text))
    text = normalize_latex(_DEGREES.sub(r" (\1 \\cdot \\frac{\\pi}{180})", text), layout)
    for formula in dict.fromkeys((text, get_last_eq(text))):
        try:
            found = _converted(formula, complex_numbers)
        except Exception:  # it raises any exception of antlr, sympy and its own code for text that is no formula
            continue
        if complex_numbers and hasattr(found, "free_symbols"):
            return found.subs({symbol: I for symbol in found.free_symbols if symbol.name == "i"})
        return found
    return None


def _converted(formula: str, complex_numbers: bool) -> Any:
    """Raises any exception for text that is no formula.

    The grammar is tried in antlr's mode SLL first. It takes half the time of LL and finds the same tree, or none.
    """
    from antlr4.atn.PredictionMode import PredictionMode
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy

    converter = _Latex2Sympy(is_real=not complex_numbers, config=ConversionConfig(lowercase_symbols=False))
    create = converter.create_parser

    def in_mode(text: str) -> Any:
        parser = create(text)
        parser._interp.predictionMode = mode
        return parser

    converter.create_parser = in_mode
    mode = PredictionMode.SLL
    try:
        return converter.parse(formula)
    except Exception:
        mode = PredictionMode.LL
        return converter.parse(formula)


@lru_cache(maxsize=1)
def _mend() -> None:
    """Hide math-verify's warning that it sets no time limits, and add a method that its grammar lacks.

    Long integers are read, too: `equal` bounds the length of their texts.

    The method is called before a percentage is read; the grammar is of antlr 4.9.3.
    """
    from latex2sympy2_extended.antlr_parser import PSParser

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sys.set_int_max_str_digits(0)
    if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
        PSParser.AtomContext.FUNC_GAMMA = lambda self: None
