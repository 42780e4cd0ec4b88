"""Names the type that an answer is read as, for people."""

from __future__ import annotations

from typing import NamedTuple

from ctpo_answers.layout import is_product
from ctpo_answers.reading import read
from ctpo_answers.readings import Based, Choice, Formula, Given, Named, Quantity, Reading, Several, Species, Wording
from ctpo_answers.times import TimeOfDay

_KINDS: dict[type, str] = {
    Formula: "formula",
    TimeOfDay: "time of day",
    Wording: "words",
    Species: "chemical formula",
    Based: "number in another base",
    Choice: "choice",
    Named: "named value",
    Given: "numbers with a parameter",
}
_SEVERAL = {
    "": "several answers",
    "{}": "set",
    ":": "ratio",
    "clock": "clock time or ratio",
    "+": "quantity",
    "x": "sides",
    "R": "quotient and remainder",
    "|": "inequalities",
    " ": "numbers in a row",
}
"""Brackets -> kind; others stand around a tuple or an interval."""


class ReadAs(NamedTuple):
    """How an answer is read. kind: its type, such as "number". value: its text in the form of `canonical`."""

    kind: str
    value: str


def read_as(answer: str) -> ReadAs:
    """Return the type and the value that an answer is read as.

    >>> read_as("\\\\frac12")
    ReadAs(kind='number', value='1/2')
    >>> read_as("10 km/h")
    ReadAs(kind='quantity', value='10 km/h')

    Needs no computer algebra system. Any text is read: what no other type fits is a formula.
    """
    reading = read(answer)
    return ReadAs(_kind(reading), str(reading))


def _kind(reading: Reading) -> str:
    if isinstance(reading, Quantity):
        formula = isinstance(reading.value, Formula)
        bare = "formula" if formula else "number"
        return "percentage" if reading.unit.percent else "quantity" if reading.unit else bare
    if isinstance(reading, Several):
        return _SEVERAL.get(reading.brackets, "tuple or interval")
    if isinstance(reading, Formula) and is_product(str(reading)):
        return "product of letters"
    return _KINDS[type(reading)]
