"""Whether two written answers are the same, and which of many answers are one in a vote."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd

from ctpo_answers import expressions
from ctpo_answers.closed_forms import rounds
from ctpo_answers.expressions import latex
from ctpo_answers.layout import as_one_number
from ctpo_answers.reading import point, read, sizes, vector
from ctpo_answers.readings import (
    Based,
    Choice,
    Formula,
    Given,
    Named,
    Quantity,
    Reading,
    Several,
    Species,
    Wording,
)
from ctpo_answers.regions import same_region
from ctpo_answers.times import TimeOfDay
from ctpo_answers.units import NONE

_OCLOCK = "oclock"

_FUNCTION_NAMES = [{"y", f"{function}(x)"} for function in "fgh"]


def same_answer(gold: str, said: str) -> bool:
    """Return whether `said` is the answer `gold`.

    >>> same_answer("5 kV", "5000 V"), same_answer("5 kV", "5 V")
    (True, False)

    Numbers are compared by their exact values, quantities with their units, several answers part by part, words letter
    by letter without their case, and what else is mathematics by math-verify. What one side leaves out is not
    compared: a unit, a name (`x =`), the letter of a choice or what stands next to it.

    Sets no time limit (see `score_math`). Raises any exception of math-verify's comparison.
    """
    one, other = read(gold), read(said)
    if _compact(one) == _compact(other) or _same(one, other):
        return True
    return isinstance(one, Quantity) and bool(number := as_one_number(said)) and _same(one, read(number))


def canonical(answer: str) -> str:
    """Return a number as a reduced fraction of integers, and anything else as its text without meaningless marks.

    >>> canonical("0.5"), canonical("1{,}000"), canonical("1000 \\\\text{ cm}")
    ('1/2', '1000', '1000 cm')

    Needs no computer algebra system and takes about 0.1 ms. Expressions that are only equal after a calculation, such
    as `2\\sqrt{2}` and `\\sqrt{8}`, stay different.
    """
    return str(read(answer))


def votes(answers: Iterable[str]) -> list[str]:
    """Return what each of several answers to one problem votes for, in a canonical form.

    >>> votes(["0.5", "1/2", "x = 2"])
    ['1/2', '1/2', '2']

    An answer without unit and name votes for the one that has them, if there is one alone: `3` and `x=3` are one
    answer, as long as none is `y=3`.
    """
    readings = [read(answer) for answer in answers]
    full: dict[str, set[str]] = defaultdict(set)
    for reading in readings:
        if str(bare := _bare(reading)) != str(reading):
            full[str(bare)].add(str(reading))
    return [str(_bare(each)) if len(full[str(_bare(each))]) < 2 else str(each) for each in readings]


def _compact(reading: Reading) -> str:
    """Its text without blanks between a number and a letter: `6 m` and `6m` are one."""
    return re.sub(r"(?<=\d) (?=[A-Za-z])|(?<=[A-Za-z]) (?=\d)", "", str(reading))


def _bare(reading: Reading) -> Reading:
    if isinstance(reading, Named):
        return _bare(reading.value)
    return replace(reading, unit=NONE) if isinstance(reading, Quantity) else reading


def _same(gold: Reading, said: Reading) -> bool:
    gold, said = _alike(gold, said), _alike(said, gold)
    if isinstance(gold, Given) or isinstance(said, Given):
        return _same_given(gold, said)
    if isinstance(gold, Choice) or isinstance(said, Choice):
        return _same_choice(gold, said)
    if (found := same_region(gold, said)) is not None:
        return found
    if isinstance(gold, Named) or isinstance(said, Named):
        return _same_named(gold, said)
    if isinstance(gold, TimeOfDay) or isinstance(said, TimeOfDay):
        return _same_time(gold, said)
    if isinstance(gold, Several) or isinstance(said, Several):
        return _same_several(gold, said)
    if isinstance(gold, Wording | Species | Based) or isinstance(said, Wording | Species | Based):
        return str(gold) == str(said) or _same_letters(gold, said)
    one, other = (side if isinstance(side, Quantity) else Quantity(side) for side in (gold, said))
    return _same_quantity(one, other)


def _alike(side: Reading, other: Reading) -> Reading:
    """A side in the form of the other one, where both forms say the same.

    `x = 2, y = 3` is a point, `x_1 = 2, x_2 = 3` the set of the solutions x, and a set of one thing is that thing.
    """
    is_set = isinstance(other, Several) and other.brackets == "{}"
    if isinstance(other, Several) and isinstance(side, Formula):
        if other.brackets == "x" and (sides := sizes(side.text)):
            return sides
        if other.brackets == "()" and (column := vector(side.text)):
            return column
    if isinstance(side, Several) and side.brackets == "{}" and len(side.items) == 1 and not is_set:
        return side.items[0]
    if not isinstance(side, Several) or side.brackets or not all(isinstance(item, Named) for item in side.items):
        return side
    names = [item.name for item in side.items if isinstance(item, Named)]
    values = tuple(item.value for item in side.items if isinstance(item, Named))
    if (is_set or isinstance(other, Named)) and len({re.sub(r"_\d$", "", name) for name in names}) == 1:
        return Named(names[0].partition("_")[0], Several(values, "{}"))
    if (isinstance(other, Named) and other.name[0] == "(") or (isinstance(other, Several) and other.brackets == "()"):
        return point(names, values)
    return side


def _same_given(gold: Reading, said: Reading) -> bool:
    conditions = {side.condition for side in (gold, said) if isinstance(side, Given)}
    one, other = (side.value if isinstance(side, Given) else side for side in (gold, said))
    return len(conditions) == 1 and _same(one, other)


def _same_letters(gold: Reading, said: Reading) -> bool:
    """Whether words and letters in a formula are spelled alike: the product `pH` is not `Hp` where words are meant."""
    if isinstance(gold, Based) or isinstance(said, Based):
        return False
    one, other = (re.sub(r"\\text|[\s_^{}]", "", str(side)) for side in (gold, said))
    return one == other if Species in (type(gold), type(said)) else one.casefold() == other.casefold()


def _same_choice(gold: Reading, said: Reading) -> bool:
    if not isinstance(gold, Choice):
        return isinstance(said, Choice) and said.value is not None and _same(gold, said.value)
    if not isinstance(said, Choice):
        return gold.value is not None and _same(gold.value, said)
    return gold.letter == said.letter and (gold.value is None or said.value is None or _same(gold.value, said.value))


def _same_named(gold: Reading, said: Reading) -> bool:
    if isinstance(gold, Named) and isinstance(said, Named):
        if gold.name == said.name:
            return _same(gold.value, said.value)
        if {gold.name, said.name} in _FUNCTION_NAMES:
            return _same(gold.value, said.value)
        return any(isinstance(side.value, Formula) for side in (gold, said)) and _same_formula(gold, said)
    other = said if isinstance(gold, Named) else gold
    if isinstance(other, Formula) and "=" in other.text:
        return _same_formula(gold, said)
    one, two = (side.value if isinstance(side, Named) else side for side in (gold, said))
    return _same(one, two)


def _same_several(gold: Reading, said: Reading) -> bool:
    one, other = _summed(gold), _summed(said)
    if not isinstance(one, Several) and not isinstance(other, Several):
        return _same(one, other)
    if isinstance(one, Several) and isinstance(other, Several):
        kinds = {one.brackets.strip("|"), other.brackets.strip("|")}
        if " " in kinds or "R" in kinds:
            return len(kinds) == 1 and _in_order(one, other)
        if kinds == {":"}:
            return _same_ratio(one, other)
        if kinds == {"", "{}"} and _has_names(one) != _has_names(other):
            return False  # a set says nothing of x and y
        if kinds <= {"", "{}"}:
            return _in_order(one, other) or _in_any_order(one, other)
        if len(kinds) == 1 or kinds in ({"", "()"}, {":", "clock"}):
            return _in_order(one, other)
        if kinds <= {"()", "[]", "(]", "[)"} or kinds == {"()", "{}"}:
            return False
    ratio, number = (one, other) if isinstance(one, Several) else (other, one)
    if isinstance(ratio, Several) and ratio.brackets in (":", "clock"):
        return _is_ratio(ratio, number) or _is_hour(ratio, number)
    if isinstance(ratio, Several) and ratio.brackets in (" ", "R"):
        return False
    return _same_formula(gold, said)


def _has_names(several: Several) -> bool:
    return any(isinstance(item, Named) for item in several.items)


def _summed(reading: Reading) -> Reading:
    """One quantity in several units as one in the largest of them."""
    if not isinstance(reading, Several) or reading.brackets != "+":
        return reading
    first, total = reading.items[0], Fraction(0)
    for item in reading.items:
        if not isinstance(item, Quantity) or not isinstance(item.value, Fraction):
            return reading
        total += item.value * item.unit.factor
    return Quantity(total / first.unit.factor, first.unit) if isinstance(first, Quantity) else reading


def _in_order(gold: Several, said: Several) -> bool:
    return len(gold.items) == len(said.items) and all(map(_same, gold.items, said.items))


def _in_any_order(gold: Several, said: Several) -> bool:
    """Each item found once, as in a set. Items that differ in what they are of must say it."""
    items, left = ([*{_compact(item): item for item in side.items}.values()] for side in (gold, said))
    if len(items) != len(left) or _kinds(items) != _kinds(left):
        return False
    for item in items:
        found = next((index for index, other in enumerate(left) if _same(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _kinds(items: Sequence[Reading]) -> bool:
    """Whether the items differ in their names or units."""
    return len({i.name if isinstance(i, Named) else str(i.unit) if isinstance(i, Quantity) else "" for i in items}) > 1


def _same_ratio(gold: Several, said: Several) -> bool:
    if _in_order(gold, said):
        return True
    one, other = _numbers(gold), _numbers(said)
    if not one or not other or len(one) != len(other) or (_is_clock(gold) and _is_clock(said)):
        return False
    if _is_clock(gold) and gcd(*(int(each) for each in one)) > 1:  # ratios are given in lowest terms
        return False
    return all(a * other[0] == b * one[0] for a, b in zip(one, other, strict=True))


def _is_ratio(ratio: Several, number: Reading) -> bool:
    """Whether a fraction is the value of a ratio: 3/2 of 3:2, but never 50 of 50:1."""
    parts = _numbers(ratio)
    value = number.value if isinstance(number, Quantity) and not number.unit else number
    if isinstance(value, Formula) and "\\frac" in value.text and len(ratio.items) == 2 and not parts:
        return expressions.equal(rf"\frac{{{latex(ratio.items[0])}}}{{{latex(ratio.items[1])}}}", str(value))
    if len(parts) != 2 or not parts[1] or not isinstance(value, Fraction):
        return False
    if _is_clock(ratio) and parts != [value.numerator, value.denominator]:
        return False
    return value.denominator > 1 and value == parts[0] / parts[1]


def _same_time(gold: Reading, said: Reading) -> bool:
    if isinstance(gold, TimeOfDay) and isinstance(said, TimeOfDay):
        return gold.seconds == said.seconds
    time, clock = (gold, said) if isinstance(gold, TimeOfDay) else (said, gold)
    numbers: list[Fraction] = []
    if isinstance(clock, Several) and clock.brackets in (":", "clock"):
        numbers = _numbers(clock)
    elif isinstance(clock, Quantity) and isinstance(clock.value, Fraction):
        numbers = [] if clock.unit and clock.unit.text != _OCLOCK else [clock.value]
    return bool(numbers) and isinstance(time, TimeOfDay) and time.is_at(numbers)


def _is_hour(clock: Several, number: Reading) -> bool:
    """Whether `5 o'clock` is the time 5:00."""
    if not isinstance(number, Quantity) or number.unit.text != _OCLOCK:
        return False
    return _numbers(clock) == [number.value, 0]


def _numbers(ratio: Several) -> list[Fraction]:
    values = [item.value for item in ratio.items if isinstance(item, Quantity) and not item.unit]
    numbers = [value for value in values if isinstance(value, Fraction)]
    return numbers if len(numbers) == len(ratio.items) else []


def _is_clock(ratio: Several) -> bool:
    hours, *others = _numbers(ratio) or [Fraction(99)]
    return hours < 25 and bool(others) and all(10 <= other < 60 for other in others)


def _same_quantity(gold: Quantity, said: Quantity) -> bool:
    percentages = [side.unit.percent for side in (gold, said)]
    if gold.unit and said.unit:
        factors = gold.unit.factors(said.unit)
        if factors is None:
            return False
        if factors[0] != factors[1]:
            return _same_value(_scaled(gold, factors[0]), _scaled(said, factors[1]))
    if any(percentages):  # 50 % is 50 of a hundred, and 1/2
        shares = [
            _scaled(side, Fraction(1, 100)) if is_percent else side
            for side, is_percent in zip((gold, said), percentages, strict=True)
        ]
        if percentages[0] != percentages[1] and _same_value(*shares):
            return True
        small = isinstance(gold.value, Fraction) and abs(gold.value) < 1
        return not (percentages[1] and small) and _same_value(gold, said)
    return _same_value(gold, said)


def _scaled(quantity: Quantity, factor: Fraction) -> Quantity:
    if isinstance(quantity.value, Fraction):
        return replace(quantity, value=quantity.value * factor)
    return Quantity(Formula(rf"({quantity.value}) \cdot \frac{{{factor.numerator}}}{{{factor.denominator}}}"))


def _same_value(gold: Quantity, said: Quantity) -> bool:
    if isinstance(gold.value, Fraction) and isinstance(said.value, Fraction):
        if gold.value == said.value:
            return True
        if gold.decimal == said.decimal:
            return False
        return rounds(gold.value, said.value) if gold.decimal else rounds(said.value, gold.value)
    return str(gold.value) == str(said.value) or _same_formula(gold, said)


def _same_formula(gold: Reading | Fraction, said: Reading | Fraction) -> bool:
    return expressions.equal(latex(gold), latex(said))
