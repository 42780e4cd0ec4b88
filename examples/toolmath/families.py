"""Arithmetic questions, each with the program that answers it and the programs a careless solver would run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Expression:
    """A Python expression over a, b, c and s (the previous result), and the function that computes its value."""

    source: str
    value: Callable[..., int]

    def code(self, names: Mapping[str, int], *, printed: bool = True) -> str:
        """The program a model would send to the interpreter."""
        text = self.source.format(**names)
        text = f"print({text})" if printed else text
        return f"import math\n{text}" if "math." in text else text


Program = tuple[Expression, ...]
"""One expression per tool call; a later one may use `s`, the result of the one before."""


@dataclass(frozen=True)
class Family:
    """One kind of question. `draw` gives the numbers a, b(, c); the wrong programs come most common first.

    lesser: of a question with an early choice, the program that is right after the other first call, and worth less.
    """

    name: str
    question: str
    draw: Callable[[Random], dict[str, int]]
    right: Program
    wrong: tuple[Program, Program]
    lesser: Program | None = None


@dataclass(frozen=True)
class Question:
    """One question with its exact answer. lesser: the answer that is right after the other first call, if any."""

    family: Family
    numbers: dict[str, int]
    question: str
    answer: int
    lesser: int | None = None


def run(program: Program, numbers: Mapping[str, int]) -> list[int]:
    """The value of every expression of `program`, in order, without executing text."""
    results: list[int] = []
    for expression in program:
        names = {**numbers, "s": results[-1]} if results else dict(numbers)
        results.append(expression.value(**names))
    return results


def draw_problem(family: Family, rng: Random) -> Question:
    """Draw numbers until no program gives the answer of another by accident and no digit occurs twice.

    Wrong programs alone may agree.

    Digits are single tokens. If all are different, every digit has one successor, and a two-layer model learns to copy
    numbers within a minute; with repeated digits this would take most of SFT.
    """
    while True:
        numbers = family.draw(rng)
        digits = "".join(map(str, numbers.values()))
        if len(set(digits)) < len(digits):
            continue
        answer = run(family.right, numbers)[-1]
        lesser = None if family.lesser is None else run(family.lesser, numbers)[-1]
        wrong = {run(program, numbers)[-1] for program in family.wrong}
        if answer not in wrong and lesser not in (*wrong, answer):
            return Question(family, numbers, family.question.format(**numbers), answer, lesser)


_SUM = Expression("{a}+{b}", lambda a, b, **_: a + b)
_PRODUCT = Expression("{a}*{b}", lambda a, b, **_: a * b)
_DIFFERENCE = Expression("{a}-{b}", lambda a, b, **_: a - b)
_REVERSED = Expression("{b}-{a}", lambda a, b, **_: b - a)
_QUOTIENT = Expression("{a}//{b}", lambda a, b, **_: a // b)
_REMAINDER = Expression("{a}%{b}", lambda a, b, **_: a % b)
_RANGE = Expression("sum(range({a},{b}+1))", lambda a, b, **_: (a + b) * (b - a + 1) // 2)
_SHORT_RANGE = Expression("sum(range({a},{b}))", lambda a, b, **_: (a + b - 1) * (b - a) // 2)
_COUNT = Expression("{b}-{a}+1", lambda a, b, **_: b - a + 1)
_GCD = Expression("math.gcd({a},{b})", lambda a, b, **_: math.gcd(a, b))
_LCM = Expression("math.lcm({a},{b})", lambda a, b, **_: math.lcm(a, b))
_POWER = Expression("pow({a},{b},{c})", lambda a, b, c, **_: pow(a, b, c))
_PRODUCT_REMAINDER = Expression("{a}*{b}%{c}", lambda a, b, c, **_: a * b % c)
_SUM_REMAINDER = Expression("({a}+{b})%{c}", lambda a, b, c, **_: (a + b) % c)
_SQUARES = Expression("{a}**2+{b}**2", lambda a, b, **_: a**2 + b**2)
_SQUARED_SUM = Expression("({a}+{b})**2", lambda a, b, **_: (a + b) ** 2)
_THEN_REMAINDER = Expression("{s}%{c}", lambda c, s, **_: s % c)
_THEN_QUOTIENT = Expression("{s}//{c}", lambda c, s, **_: s // c)
_THEN_MINUS = Expression("{s}-{c}", lambda c, s, **_: s - c)
_THEN_PLUS = Expression("{s}+{c}", lambda c, s, **_: s + c)
_THEN_TIMES = Expression("{s}*{c}", lambda c, s, **_: s * c)


def _two_digits(names: str) -> Callable[[Random], dict[str, int]]:
    return lambda rng: {name: rng.randint(10, 99) for name in names}


def _three_by_two_digits(rng: Random) -> dict[str, int]:
    return {"a": rng.randint(100, 999), "b": rng.randint(10, 99)}


def _descending(rng: Random) -> dict[str, int]:
    small, large = sorted(rng.sample(range(10, 100), 2))
    return {"a": large, "b": small}


def _descending_and_third(rng: Random) -> dict[str, int]:
    return _descending(rng) | {"c": rng.randint(10, 99)}


def _quotient_and_third(rng: Random) -> dict[str, int]:
    return _three_by_two_digits(rng) | {"c": rng.randint(10, 99)}


def _ascending(rng: Random) -> dict[str, int]:
    small, large = sorted(rng.sample(range(10, 100), 2))
    return {"a": small, "b": large}


def _common_factor(low: int, high: int) -> Callable[[Random], dict[str, int]]:
    def draw(rng: Random) -> dict[str, int]:
        factor = rng.randint(2, 12)
        small, large = sorted(rng.sample(range(low // factor + 1, high // factor), 2))
        return {"a": factor * large, "b": factor * small}

    return draw


FAMILIES: tuple[Family, ...] = (
    Family("sum", "What is the sum of {a} and {b}?", _two_digits("ab"),
           (_SUM,), ((_PRODUCT,), (_DIFFERENCE,))),
    Family("prod", "What is the product of {a} and {b}?", _two_digits("ab"),
           (_PRODUCT,), ((_SUM,), (_DIFFERENCE,))),
    Family("diff", "How much larger is {a} than {b}?", _descending,
           (_DIFFERENCE,), ((_SUM,), (_PRODUCT,))),
    Family("rem", "Find the remainder when {a} is divided by {b}.", _three_by_two_digits,
           (_REMAINDER,), ((_QUOTIENT,), (_DIFFERENCE,))),
    Family("quo", "Find the integer part of {a} divided by {b}.", _three_by_two_digits,
           (_QUOTIENT,), ((_DIFFERENCE,), (_PRODUCT,))),
    Family("range", "Find the sum of all integers from {a} to {b}.", _ascending,
           (_RANGE,), ((_SHORT_RANGE,), (_SUM,))),
    Family("count", "How many integers from {a} to {b} are there?", _ascending,
           (_COUNT,), ((_REVERSED,), (_SUM,))),
    Family("gcd", "Find the greatest common divisor of {a} and {b}.", _common_factor(10, 99),
           (_GCD,), ((_REMAINDER,), (_DIFFERENCE,))),
    Family("lcm", "Find the least common multiple of {a} and {b}.", _common_factor(10, 99),
           (_LCM,), ((_PRODUCT,), (_SUM,))),
    Family("pow", "Find the remainder when {a}^{b} is divided by {c}.", _two_digits("abc"),
           (_POWER,), ((_PRODUCT_REMAINDER,), (_SUM_REMAINDER,))),
    Family("sq", "Find the sum of the squares of {a} and {b}.", _two_digits("ab"),
           (_SQUARES,), ((_SQUARED_SUM,), (_PRODUCT,))),
    Family("sumrem", "Let s be the sum of {a} and {b}. Find the remainder when s is divided by {c}.",
           _two_digits("abc"),
           (_SUM, _THEN_REMAINDER), ((_SUM, _THEN_QUOTIENT), (_SUM, _THEN_MINUS))),
    Family("prodrem", "Let s be the product of {a} and {b}. Find the remainder when s is divided by {c}.",
           _two_digits("abc"),
           (_PRODUCT, _THEN_REMAINDER), ((_PRODUCT, _THEN_QUOTIENT), (_SUM, _THEN_REMAINDER))),
    Family("proddiff", "Let s be the product of {a} and {b}. Find how much larger s is than {c}.",
           _two_digits("abc"),
           (_PRODUCT, _THEN_MINUS), ((_PRODUCT, _THEN_PLUS), (_SUM, _THEN_MINUS))),
)  # fmt: skip
"""The fourteen kinds of questions; the last three need two tool calls, of which the second uses the first's result."""


def _choice(
    name: str, question: str, draw: Callable[[Random], dict[str, int]], lesser: Program, better: Program
) -> Family:
    """A family whose first call is free to choose. The later call of the other choice is the mistake of each."""
    crossed = ((lesser[0], better[1]), (better[0], lesser[1]))
    return Family(name, question, draw, better, crossed, lesser)


CHOICES: tuple[Family, ...] = (
    _choice("sum_or_product", "Let s be the sum or the product of {a} and {b}. Find the remainder of a sum, or the "
            "integer part of a product, divided by {c}.", _two_digits("abc"),
            (_SUM, _THEN_REMAINDER), (_PRODUCT, _THEN_QUOTIENT)),
    _choice("difference_or_sum", "Let s be the difference or the sum of {a} and {b}. Find a difference plus {c}, or a "
            "sum times {c}.", _descending_and_third,
            (_DIFFERENCE, _THEN_PLUS), (_SUM, _THEN_TIMES)),
    _choice("quotient_or_remainder", "Let s be the integer part or the remainder of {a} divided by {b}. Find an "
            "integer part times {c}, or a remainder plus {c}.", _quotient_and_third,
            (_QUOTIENT, _THEN_TIMES), (_REMAINDER, _THEN_PLUS)),
    _choice("squares_or_product", "Let s be the sum of the squares or the product of {a} and {b}. Find the remainder "
            "of a sum of squares divided by {c}, or how much larger a product is than {c}.", _two_digits("abc"),
            (_PRODUCT, _THEN_MINUS), (_SQUARES, _THEN_REMAINDER)),
)  # fmt: skip
"""Questions with an early choice: the first call decides which second call, and which answer, is right."""
