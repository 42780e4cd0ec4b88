"""No scorer and no vote takes different numbers for equal, however they are written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest

from ctpo_answers import canonical, score_math, score_reference, votes

SEEDS = range(6)
NEIGHBOURS = 40
"""Pairs of numbers for each seed."""


def decimal(value: Fraction) -> str:
    """All digits of a number that is a decimal."""
    with localcontext(prec=60):
        return f"{Decimal(value.numerator) / Decimal(value.denominator):f}"


def is_decimal(value: Fraction) -> bool:
    return (10**20) % value.denominator == 0


def repeating(value: Fraction) -> str:
    """As a decimal with a bar over its period."""
    whole, rest = divmod(value.numerator, value.denominator)
    seen: dict[int, int] = {}
    digits = ""
    while rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(10 * rest, value.denominator)
        digits += str(digit)
    start = seen[rest]
    return rf"{whole}.{digits[:start]}\overline{{{digits[start:]}}}"


def spellings(value: Fraction) -> Iterator[str]:
    """Ways to write a number, all of them exact."""
    sign, size = "-" if value < 0 else "", abs(value)
    above, below = size.numerator, size.denominator
    yield rf"{sign}\frac{{{above}}}{{{below}}}"
    yield f"{sign}{above}/{below}"
    yield rf"{sign}\frac{{{3 * above}}}{{{3 * below}}}"
    whole, rest = divmod(above, below)
    if whole and rest:
        yield rf"{sign}{whole}\frac{{{rest}}}{{{below}}}"
        yield f"{sign}{whole} {rest}/{below}"
    if is_decimal(size):
        text = decimal(size)
        yield sign + text
        yield f"{sign}{text}0" if "." in text else f"{sign}{text}.0"
        if len(text.partition(".")[2]) != 3:  # a comma before three digits groups them
            yield sign + text.replace(".", "{,}")
        yield f"{sign}{decimal(size * 100)}\\%"
        yield rf"{sign}{decimal(size / 1000)} \times 10^{{3}}"
        yield rf"{sign}{decimal(size * 100)} \cdot 10^{{-2}}"
        yield f"{sign}{decimal(size / 10)}e1"
    elif below < 22:
        yield sign + repeating(size)
    if below == 1 and above >= 1000:
        for mark in (",", "{,}", r"\,", " ", "~"):
            yield f"{sign}{above:,}".replace(",", mark)
    if below == 1 and above >= 10**6:
        yield sign + f"{above:,}".replace(",", ".")  # with one group it would be a decimal
        yield sign + f"{above:,}".replace(",", "'")
        yield sign + indian(above).replace(",", "{,}")


def indian(value: int) -> str:
    """With commas as in `12,34,567`."""
    above, last = divmod(value, 1000)
    digits = str(above)
    pairs = [digits[max(0, end - 2) : end] for end in range(len(digits), 0, -2)]
    return ",".join((*reversed(pairs), f"{last:03}"))


def number(draw: random.Random) -> Fraction:
    kind = draw.randrange(5)
    if kind == 0:
        return Fraction(draw.randint(-50, 50))
    if kind == 1:
        return Fraction(draw.randint(1000, 9_999_999) * draw.choice((1, 1, -1)))
    if kind == 2:
        return Fraction(draw.randint(-9999, 9999), 10 ** draw.randint(1, 9))
    if kind == 3:
        return Fraction(draw.randint(-60, 60), draw.randint(2, 21))
    return draw.randint(1, 12) + Fraction(draw.randint(1, 8), 9)


def neighbours(value: Fraction, draw: random.Random) -> Iterator[Fraction]:
    """Numbers that are easily taken for another one: another sign, digit, place of the point, part, or rounding."""
    digits = str(abs(value.numerator))
    place = draw.randrange(len(digits))
    changed = digits[:place] + str((int(digits[place]) + 1) % 10) + digits[place + 1 :]
    yield -value
    yield value + 1
    yield value * 10
    yield value / 10
    yield value * (1 + Fraction(1, 10**9))
    yield Fraction(int(changed), value.denominator)
    yield Fraction(value.numerator, value.denominator + 1)
    yield Fraction(int(value))
    yield value - int(value)
    yield round(value, 2)
    yield round(value, 8)
    if value:
        yield 1 / value
    yield Fraction(int(digits[:-1] or "0"), value.denominator)


def pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Spellings of two different numbers."""
    draw = random.Random(seed)
    for _ in range(NEIGHBOURS):
        one = number(draw)
        other = draw.choice([each for each in neighbours(one, draw) if each != one])
        yield draw.choice(numbers(one)), draw.choice(numbers(other))


def numbers(value: Fraction) -> list[str]:
    """Without percentages: both 50 and 0.5 are right for 50 %, so these are compared with each other only."""
    return [text for text in spellings(value) if "%" not in text]


def percentages(seed: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(seed)
    for _ in range(NEIGHBOURS):
        one = Fraction(draw.randint(-9999, 9999), draw.choice((1, 10, 100)))
        other = draw.choice([each for each in neighbours(one, draw) if each != one and is_decimal(each)])
        yield f"{decimal(one)}\\%", f"{decimal(other)}\\%"


def complexes(seed: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(seed)
    for _ in range(NEIGHBOURS // 4):
        real, imaginary = (Fraction(draw.randint(1, 30) * draw.choice((1, -1)), draw.choice((1, 1, 2))) for _ in "ab")
        changed = draw.choice([(real, -imaginary), (-real, imaginary), (imaginary, real), (real + 1, imaginary)])
        if changed != (real, imaginary):
            yield complex_text(real, imaginary, draw), complex_text(*changed, draw)


def complex_text(real: Fraction, imaginary: Fraction, draw: random.Random) -> str:
    parts = [decimal(each) if draw.random() < 0.5 else fraction(each) for each in (real, abs(imaginary))]
    sign = "-" if imaginary < 0 else "+"
    return draw.choice((f"{parts[0]}{sign}{parts[1]}i", f"{parts[0]} {sign} {parts[1]} i"))


def fraction(value: Fraction) -> str:
    return next(spellings(value)) if value.denominator > 1 else str(value.numerator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draw", [pairs, percentages, complexes])
def test_different_numbers_stay_different(draw, seed: int) -> None:
    for gold, said in draw(seed):
        box = f"\\boxed{{{said}}}"
        assert canonical(gold) != canonical(said), (gold, said)
        assert len(set(votes([gold, said]))) == 2, (gold, said)
        assert score_math(box, gold) == 0, (gold, said)
        assert score_reference(box, gold) == 0, (gold, said)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_number_is_one_in_all_its_spellings(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(NEIGHBOURS):
        value = number(draw)
        texts = numbers(value)
        assert len(set(votes(texts))) == 1, texts
        gold = draw.choice(texts)
        assert all(score_math(f"\\boxed{{{said}}}", gold) for said in spellings(value)), (gold, texts)
