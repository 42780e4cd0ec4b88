"""Times, intervals and grouped digits: the same in all their spellings, and never another time, interval or number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
from test_different_numbers import decimal, fraction, indian

from ctpo_answers import canonical, score_math

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
DRAWN = 25
"""Of each seed."""
DAY = 24 * 60


def same(gold: str, said: str) -> bool:
    return score_math(f"\\boxed{{{said}}}", gold) == 1


def clock(minutes: int) -> Iterator[str]:
    """Spellings of a time that leave nothing out."""
    hour, minute = divmod(minutes, 60)
    half = "p.m." if hour >= 12 else "a.m."
    yield f"{(hour - 1) % 12 + 1}:{minute:02} {half}"
    yield rf"{(hour - 1) % 12 + 1}:{minute:02} \text{{ {half[0].upper()}M}}"
    if hour > 12 or hour == 0:
        yield f"{hour:02}:{minute:02}"
    if minute == 0:
        yield f"{(hour - 1) % 12 + 1} {half}"
    yield from {0: ["midnight", "24:00"], DAY // 2: ["noon", "12:00"]}.get(minutes, [])


@pytest.mark.parametrize("seed", SEEDS)
def test_times(seed: int) -> None:
    draw = random.Random(seed)
    for minutes in (0, DAY // 2, *(draw.randrange(DAY) for _ in range(DRAWN))):
        others = {(minutes + shift) % DAY for shift in (1, 60, DAY // 2, draw.randrange(1, DAY))}
        for gold in clock(minutes):
            assert all(same(gold, said) for said in clock(minutes)), gold
            wrong = [said for other in others for said in clock(other) if same(gold, said)]
            assert not wrong, (gold, wrong)


def interval(start: Fraction, end: Fraction, brackets: str) -> str:
    return f"{brackets[0]}{fraction(start)}, {fraction(end)}{brackets[1]}"


def chain(start: Fraction, end: Fraction, brackets: str, name: str = "x") -> str:
    before, after = (r"\le" if bracket in "[]" else "<" for bracket in brackets)
    return rf"{fraction(start)} {before} {name} {after} {fraction(end)}"


def outside(start: Fraction, end: Fraction, brackets: str) -> str:
    """What is left out by an interval."""
    before, after = (r"\le" if bracket in "()" else "<" for bracket in brackets)
    return rf"x {before} {fraction(start)} \text{{ or }} {fraction(end)} {after} x"


@pytest.mark.parametrize("seed", SEEDS)
def test_absolute_values_are_intervals(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(DRAWN):
        slope, offset, size = draw.choice((-3, -2, 2, 3)), draw.randint(-9, 9), draw.randint(1, 9)
        start, end = sorted(Fraction(side * size - offset, slope) for side in (1, -1))
        brackets, sign, opposite = draw.choice((("()", "<", r"\ge"), ("[]", r"\le", ">")))
        text = rf"|{slope}x {offset:+}| {sign} {size}"
        spelled = [text, interval(start, end, brackets), chain(start, end, brackets)]
        left_out = rf"|{slope}x {offset:+}| {opposite} {size}"
        wrong = [
            *(interval(start, end + 1, brackets), interval(start, end, "[]" if brackets == "()" else "()")),
            *(interval(-end, -start, brackets),) * (start != -end),
            *(chain(start - 1, end, brackets), rf"x {sign} {fraction(end)}"),
            *(left_out, outside(start, end, brackets), rf"|{slope}x {offset:+}| {sign} {size + 1}"),
        ]
        assert all(same(gold, said) for gold in spelled for said in spelled), spelled
        assert not [(gold, said) for gold in spelled for said in wrong if same(gold, said)], spelled
        assert not any(same(gold, chain(start, end, brackets, "y")) for gold in (spelled[0], spelled[2]))
        assert same(left_out, outside(start, end, brackets)) and same(outside(start, end, brackets), left_out)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_comma_in_an_answer_stands_in_the_number_or_between_two(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(DRAWN):
        whole, places = draw.randint(10**6, 10**9), draw.randint(1, 99)
        value = whole + Fraction(places, 100)
        answers = [f"{whole:,}".replace(",", mark) + f",{places:02}" for mark in (".", " ", "'")]
        assert all(same(decimal(value), said) for said in answers), answers
        assert not any(same(gold, said) for gold in (str(whole), decimal(value * 100), "-1") for said in answers)
        number = draw.randint(1, 99) * 10**5 + draw.randint(11, 99) * 1000 + draw.randint(100, 999)
        assert same(str(number), indian(number)), number
        assert same(indian(number).replace(",", ", "), indian(number)), number
        assert not same(str(number), indian(number).replace(",", ", ")), number
        assert not same(str(number + 1), indian(number)), number


@pytest.mark.parametrize(("gold", "said"), [("12.10.2024", "12.1.2024"), ("1.10.2024", "1.1.2024")])
def test_a_date_is_no_number(gold: str, said: str) -> None:
    assert canonical(gold) != canonical(said)
    assert same(gold, gold) and not same(gold, said)


@pytest.mark.parametrize("said", ["7\\%", "7 \\text{ km}", "7.5", "-7", "7:15", "19"])
def test_what_is_no_time(said: str) -> None:
    assert not same("7 p.m.", said) and not same(said, "7 p.m.")


@pytest.mark.parametrize("value", [1, 60, Fraction(5, 2), 45])
def test_a_rate_is_the_same_in_other_units(value: Fraction) -> None:
    number = decimal(Fraction(value))
    said = rf"{fraction(Fraction(value) * 5 / 18)} \text{{ m/s}}"
    assert same(f"{number} km/h", said) and not same(f"{number} mph", said)
    cents = f"{decimal(Fraction(value) * 100)} cents per hour"
    assert same(f"${number} per hour", cents) and not same(f"${number} a day", cents)


@pytest.mark.parametrize("said", ["x=3, y=4 \\text{ or } x=1, y=2", "(3,4), (1,2)", "(x,y) = (1,2), (3,4)"])
def test_pairs_stay_together(said: str) -> None:
    assert same("x=1, y=2 \\text{ or } x=3, y=4", said)
    assert not same("x=1, y=4 \\text{ or } x=3, y=2", said)
