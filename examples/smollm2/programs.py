"""Programs that solve a problem of reasoning-gym, and programs with a usual mistake, from the problem's `metadata`."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Metadata = dict[str, Any]


@dataclass(frozen=True)
class Programs:
    """right: prints the answer. wrong: common mistakes, which may print the answer by accident."""

    right: str
    wrong: tuple[str, ...]


def output(program: str) -> str | None:
    """What a program prints, without the final newline; None if it raises an ArithmeticError."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            exec(program, {})  # of this file, not of a model
        except ArithmeticError:
            return None
    return shown.getvalue().strip()


def chain_sum(_: str, metadata: Metadata) -> Programs:
    terms = metadata["expression"].split()
    flipped = [*terms[:-2], {"+": "-", "-": "+"}[terms[-2]], terms[-1]]
    return Programs(_print(" ".join(terms)), (_print(" ".join(terms[:-2])), _print(" ".join(flipped))))


def products(_: str, metadata: Metadata) -> Programs:
    expression = metadata["expression"]
    return Programs(_print(expression), (_print(expression.replace("*", "+")), _print(expression.replace("*", "-"))))


def gcd(_: str, metadata: Metadata) -> Programs:
    a, b = metadata["numbers"]
    return Programs(_math("gcd", a, b), (_math("lcm", a, b), _print(f"{a} % {b}")))


def lcm(_: str, metadata: Metadata) -> Programs:
    a, b = metadata["numbers"]
    return Programs(_math("lcm", a, b), (_math("gcd", a, b), _print(f"{a} * {b}")))


def count_bits(_: str, metadata: Metadata) -> Programs:
    number = metadata["number"]
    return Programs(
        _print(f'bin({number}).count("1")'), (_print(f'str({number}).count("1")'), _print(f"len(bin({number}))"))
    )


def letter_counting(_: str, metadata: Metadata) -> Programs:
    text, letter = " ".join(metadata["span"]), metadata["target_letter"]
    return Programs(_print(f'"{text.lower()}".count("{letter}")'), (_print(f'len("{text.lower()}")'),))


def simple_geometry(_: str, metadata: Metadata) -> Programs:
    sides, known = metadata["n_sides"], [f"{angle:g}" for angle in metadata["known_angles"]]
    rest = " - ".join(known)
    return Programs(
        _print(f"180 * ({sides} - 2) - {rest}"), (_print(f"180 * {sides} - {rest}"), _print(f"360 - {rest}"))
    )


def leg_counting(_: str, metadata: Metadata) -> Programs:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    counts = metadata["animals"]
    right = " + ".join(f"{count} * {ANIMALS[animal]}" for animal, count in counts.items())
    four = " + ".join(f"{count} * 4" for count in counts.values())
    return Programs(_print(right), (_print(four), _print(" + ".join(map(str, counts.values())))))


def gsm_symbolic(question: str, metadata: Metadata) -> Programs | None:
    """The calculations of the worked solution as one expression; None where they cannot be read or do not suffice.

    A mistake replaces one operator.
    """
    expression = _expression(question, metadata["answer_cot"], str(metadata["answer_value"]))
    if expression is None:
        return None
    places = [found.start() for found in re.finditer(r"(?<= )[-+*/](?= )", expression)]
    swap = {"+": "-", "-": "+", "*": "+", "/": "*"}
    wrong = [_print(expression[:at] + swap[expression[at]] + expression[at + 1 :]) for at in (places[-1], places[0])]
    return Programs(_print(expression), tuple(wrong))


PROGRAMS: dict[str, Callable[[str, Metadata], Programs | None]] = {
    function.__name__: function
    for function in (
        chain_sum,
        count_bits,
        gcd,
        gsm_symbolic,
        lcm,
        leg_counting,
        letter_counting,
        products,
        simple_geometry,
    )
}
"""Family of reasoning-gym -> programs of a problem, from its question and metadata."""

_CALCULATION = re.compile(r"([-+*/() .\d]*[-+*/][-+*/() .\d]*)=\s*(-?\d+(?:\.\d+)?)")
_UNITS = re.compile(r"^\s*\d+\.\s|[$€£•]|/?[A-Za-z]+[,:;.?!]?|(?<=\d)[.,](?=\s)", re.MULTILINE)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.Constant, ast.operator)
_CONVERSIONS = {"2", "7", "12", "60", "100"}
"""Numbers that a solution may use without the question naming them."""
_NUMBER = re.compile(r"(?<![\d.])\d+(?:\.\d+)?(?![\d.])")


def _expression(question: str, solution: str, answer: str) -> str | None:
    """One expression of the numbers in the question, with the value `answer`."""
    known: dict[str, str] = {}  # result of a calculation -> the calculation
    given = set(_NUMBER.findall(question))
    found = None
    for calculation, result in _CALCULATION.findall(_UNITS.sub("", solution.replace("×", "*"))):
        inner = _NUMBER.sub(
            lambda number: number[0] if number[0] in given else known.get(number[0], number[0]), calculation.strip()
        )
        try:
            tree = ast.parse(inner, mode="eval")
        except SyntaxError:
            return None
        if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)):
            return None
        found = ast.unparse(tree)
        known[result] = f"({found})"
    # Another number would be an intermediate result whose calculation was not read.
    if found is None or not set(_NUMBER.findall(found)) <= given | _CONVERSIONS or not re.search(r" [-+*/] ", found):
        return None
    value = output(_print(found))
    return found if value is not None and value == answer else None


def _math(function: str, a: int, b: int) -> str:
    return f"import math\nprint(math.{function}({a}, {b}))"


def _print(expression: str) -> str:
    return f"print({expression})"
