"""Exact values of numbers: decimals, fractions, mixed and repeating ones, powers of ten, and English words."""

from __future__ import annotations

import re
from fractions import Fraction

from ctpo_answers.layout import word_set

_LARGEST_EXPONENT = 999

_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?\s*{_DECIMAL}"
_TIMES_TEN = r"(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+)|\(\s*([+-]?\d+)\s*\))"
_REPEATING = r"(?P<whole>\d*)\.(?P<fixed>\d*)(?:\\overline\s*\{\s*(?P<bar>\d+)\s*\}|\((?P<round>\d+)\))"
_DOTTED = r"(?P<dwhole>\d*)\.(?P<dfixed>\d*)(?P<dots>\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?)"
_GOES_ON = r"(?P<shown>\d*\.\d+)\s*\\ldots"
_FRACTION = rf"\\frac\s*\{{\s*({_SIGNED})\s*\}}\s*\{{\s*({_SIGNED})\s*\}}"
_FORMS = tuple(
    re.compile(form)
    for form in (
        _REPEATING,
        _DOTTED,
        _GOES_ON,
        rf"(?P<mixed>\d+)\s*{_FRACTION}",
        r"(?P<mixed>\d+) (\d+)\s*/\s*(\d+)",
        _FRACTION,
        rf"({_DECIMAL})\s*/\s*({_DECIMAL})",
        rf"(?P<factor>{_DECIMAL})\s*{_TIMES_TEN}",
        r"(?P<factor>)10\s*\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+)|\(\s*([+-]?\d+)\s*\))",
        rf"(?P<mantissa>{_DECIMAL})[eE](?P<exponent>[+-]?\d+)",
        rf"(?P<decimal>{_DECIMAL})",
    )
)
_SIGN = re.compile(r"\s*([+-]?)\s*")


def numeral(text: str) -> tuple[Fraction, int] | None:
    """Return the exact value of the number that a text begins with, and where it ends; None where none begins."""
    sign = _SIGN.match(text)
    start = sign.end() if sign else 0
    for form in _FORMS:
        if found := form.match(text, start):
            value = _value(found)
            if value is not None:
                return (-value if sign and sign[1] == "-" else value), found.end()
    return None


def _value(found: re.Match[str]) -> Fraction | None:
    groups = found.groupdict()
    if "bar" in groups:
        return _repeating(groups["whole"], groups["fixed"], groups["bar"] or groups["round"])
    if "dots" in groups:
        return _repeating(groups["dwhole"], groups["dfixed"], re.sub(r"\D", "", groups["dots"]))
    if "shown" in groups:
        return _going_on(groups["shown"])
    if "mantissa" in groups:
        return _scaled(Fraction(groups["mantissa"]), groups["exponent"])
    if "factor" in groups:
        return _scaled(Fraction(groups["factor"] or 1), next(each for each in found.groups()[1:] if each))
    if "decimal" in groups:
        return Fraction(groups["decimal"])
    above, below = (Fraction(part.replace(" ", "")) for part in found.groups()[-2:])
    if not below:
        return None
    if "mixed" not in groups:
        return above / below
    return int(groups["mixed"]) + above / below if 0 <= above < below else None


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    """`whole`.`fixed``period``period`... ."""
    nines = (10 ** len(period) - 1) * 10 ** len(fixed)
    return Fraction(int(whole + fixed + period or "0") - int(whole + fixed or "0"), nines)


def _going_on(shown: str) -> Fraction | None:
    """A decimal with `...` after it. Its shortest period continues, if it stands there three times or twice."""
    whole, _, places = shown.partition(".")
    for length in range(1, len(places) // 2 + 1):
        period, times = places[-length:], 3 if length == 1 else 2
        if places.endswith(period * times):
            return _repeating(whole, places[:-length], period)
    return None


def _scaled(factor: Fraction, exponent: str) -> Fraction | None:
    power = int(exponent.replace(" ", ""))
    return factor * Fraction(10) ** power if abs(power) <= _LARGEST_EXPONENT else None


_DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen"),
    *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_PARTS = {
    **{"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7},
    **{"eighth": 8, "ninth": 9, "tenth": 10},
}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_VALUES = {
    **{word: value for value, word in enumerate((*_DIGITS, *_TEENS), 1)},
    **{word: 10 * value for value, word in enumerate(_TENS, 2)},
}

_digit = rf"(?:{'|'.join(_DIGITS)})"
_under_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[ -]{_digit})?|{'|'.join(_TEENS)}|{_digit})"
_under_1000 = rf"(?:(?:{_digit}|a) hundred(?:(?: and)? {_under_100})?|{_under_100})"
_whole = "".join(rf"(?:(?:{_under_1000}|a) {scale}(?:,? (?:and )?|(?![a-z])))?" for scale in reversed(_SCALES))
_WORDS_OF_NUMBER = re.compile(
    rf"(?P<sign>(?:minus|negative) )?(?:(?P<zero>zero)|(?:(?P<dozens>{_under_100}|a|half a) )?(?P<dozen>dozen)"
    rf"|(?:(?P<above>{_under_100})[ -])(?P<part>{'|'.join(_PARTS)})(?P<plural>s?)"
    rf"|(?P<whole>(?=[a-z]){_whole}(?:{_under_1000})?)(?P<half> and a half)?)(?![a-z-])"
)
_NO_COUNT = word_set(
    "of to or and than at most least about in by over point times plus minus squared cubed power root way "
    "each dozen hundred thousand million billion a the who that"
) | {*_VALUES, *_PARTS, *(f"{part}s" for part in _PARTS), "zero"}
"""Words after a number that change it, or that make a pronoun of `one`."""
_COUNTED = re.compile(r"[a-z]{3,}(?: [a-z]{2,})?(?: per [a-z]{3,})?|\\%")


def spoken(words: str) -> tuple[Fraction, str] | None:
    """Return the number that lower-case words begin with, and what it counts; None where they say no number."""
    found = _WORDS_OF_NUMBER.match(words)
    counted = words[found.end() :].strip() if found else ""
    if found is None or not found[0].strip() or (counted and not _COUNTED.fullmatch(counted)):
        return None
    if not _NO_COUNT.isdisjoint(counted.split()):
        return None
    value = _spoken_value(found)
    return None if value is None else (-value if found["sign"] else value, counted)


def _spoken_value(found: re.Match[str]) -> Fraction | None:
    if found["zero"]:
        return Fraction(0)
    if found["dozen"]:
        return Fraction(6 if found["dozens"] == "half a" else 12 * _sum(found["dozens"] or "a"))
    if found["part"] is None:
        return _sum(found["whole"]) + Fraction(bool(found["half"]), 2)
    above = _sum(found["above"])
    if (above > 1) != bool(found["plural"]):  # `twenty-fifth` is no fraction
        return None
    return Fraction(above, _PARTS[found["part"]])


def _sum(words: str) -> int:
    total, part = 0, 0
    for word in re.findall(r"[a-z]+", words):
        if word == "hundred":
            part *= 100
        elif word in _SCALES:
            total, part = total + part * _SCALES[word], 0
        else:
            part += 1 if word == "a" else _VALUES.get(word, 0)
    return total + part
