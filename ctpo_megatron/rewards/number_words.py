"""Exact values of numbers in English words: `twenty-one`, `two dozen`, `one third`."""

from __future__ import annotations

import re
from fractions import Fraction

from ctpo_megatron.rewards.layout import word_set

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
_NUMBER = re.compile(
    rf"(?P<sign>(?:minus|negative) )?(?:(?P<zero>zero)|(?:(?P<dozens>{_under_100}|a|half a) )?(?P<dozen>dozen)"
    rf"|(?:(?P<above>{_under_100})[ -])(?P<part>{'|'.join(_PARTS)})(?P<plural>s?)"
    rf"|(?P<whole>(?=[a-z]){_whole}(?:{_under_1000})?)(?P<half> and a half)?)(?![a-z-])"
)
_NO_COUNT = word_set(
    "of to or and more less than at most least about in by over point times plus minus squared cubed power root way "
    "each dozen hundred thousand million billion a the who that"
) | {*_VALUES, *_PARTS, *(f"{part}s" for part in _PARTS), "zero"}
"""Words after a number that change it, or that make a pronoun of `one`."""
_COUNTED = re.compile(r"[a-z]{3,}(?: [a-z]{3,})?(?: per [a-z]{3,})?|\\%")


def spoken(words: str) -> tuple[Fraction, str] | None:
    """The number that lower-case words begin with, and what it counts; None where they say no number."""
    found = _NUMBER.match(words)
    counted = words[found.end() :].strip() if found else ""
    if found is None or not found[0].strip() or (counted and not _COUNTED.fullmatch(counted)):
        return None
    if not _NO_COUNT.isdisjoint(counted.split()):
        return None
    value = _value(found)
    return None if value is None else (-value if found["sign"] else value, counted)


def _value(found: re.Match[str]) -> Fraction | None:
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
