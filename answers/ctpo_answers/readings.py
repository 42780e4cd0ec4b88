"""What an answer can say: one class for each type of answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ctpo_answers.times import TimeOfDay
from ctpo_answers.units import NONE, Unit


@dataclass(frozen=True, slots=True)
class Formula:
    """What only a computer algebra system can compare. text: LaTeX."""

    text: str

    def __str__(self) -> str:
        return re.sub(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])|(?<=\d) (?=[A-Za-z])|(?<=[A-Za-z]) (?=\d)", "", self.text)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, or a formula for one, with its unit. decimal: whether the number is written with a decimal point."""

    value: Fraction | Formula
    unit: Unit = NONE
    decimal: bool = False

    def __str__(self) -> str:
        return f"{self.value} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class Wording:
    """Words as an answer, in lower case."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Species:
    """A chemical formula, in which case counts: `CO2`, `Na+`."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Based:
    """A number in another base than ten. digits: without leading zeros, in lower case."""

    digits: str
    base: str

    def __str__(self) -> str:
        return f"{self.digits}_{self.base}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter of multiple choice, and what stands next to it."""

    letter: str
    value: Reading | None = None

    def __str__(self) -> str:
        return f"({self.letter})" if self.value is None else f"({self.letter}) {self.value}"


@dataclass(frozen=True, slots=True)
class Named:
    """`name = value` or `name \\in value`."""

    name: str
    value: Reading

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True)
class Several:
    """Several answers. brackets: around them; "" for a list, " " for numbers with blanks between.

    A ratio has ":", a time ":" or "clock". One quantity in several units has "+", the sides of a rectangle have "x".
    A quotient and its remainder have "R". Inequalities of which any may hold have "|".
    """

    items: tuple[Reading, ...]
    brackets: str = ""

    def __str__(self) -> str:
        between = {":": ":", "clock": ":", "+": " ", " ": " ", "R": " R ", "x": r" \times "}.get(self.brackets, ",")
        inner = between.join(map(str, self.items))
        return f"{self.brackets[0]}{inner}{self.brackets[1]}" if len(self.brackets) == 2 else inner


@dataclass(frozen=True, slots=True)
class Given:
    """What is said for a parameter in a set of numbers. condition: `k\\in\\mathbb{Z}`, without blanks."""

    value: Reading
    condition: str

    def __str__(self) -> str:
        return f"{self.value},{self.condition}"


Reading = Given | Formula | Quantity | TimeOfDay | Wording | Species | Based | Choice | Named | Several
