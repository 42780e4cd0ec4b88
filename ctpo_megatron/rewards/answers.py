"""Canonical form of answers, without a computer algebra system: takes microseconds, so needs no time limit."""

from __future__ import annotations

import re
from fractions import Fraction

_LONGEST = 1000
"""In characters; a longer text is not an answer with several spellings."""

_DROPPED = (
    "\\left", "\\right", "\\displaystyle", "\\limits", "\\!", "\\,", "\\;", "\\:", "\\ ", "{,}", "\\$", "$", "^\\circ",
    "^{\\circ}", "\\circ", "\\degree", "\\%", "%",
)  # fmt: skip
_SAME = (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cfrac", "\\frac"), ("\\lbrace", "\\{"), ("\\rbrace", "\\}"))
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textrm|boxed|fbox|overline)\s*\{([^{}]*)\}")
_NAMED = re.compile(r"^\s*(?:[A-Za-z]\w{0,2}|\\[a-z]+)\s*=\s*(?=\S)")
_BARE_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\w)")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d{1,99})?")
_NUMBER = re.compile(r"[+-]?(?:\d{1,999}(?:\.\d{0,999})?|\.\d{1,999})")
_FRACTION = re.compile(rf"([+-]?)\\frac\{{({_NUMBER.pattern})\}}\{{({_NUMBER.pattern})\}}")
_RATIO = re.compile(rf"({_NUMBER.pattern})/({_NUMBER.pattern})")


def canonical(answer: str) -> str:
    """A number as a reduced fraction of integers; anything else as its text without meaningless marks.

    `0.5`, `1/2`, `\\dfrac12` and `x = \\frac{1}{2}` are "1/2"; `1{,}000` and `1,000 \\text{ cm}` are "1000".
    Expressions that are only equal after a calculation, such as `2\\sqrt{2}` and `\\sqrt{8}`, stay different.
    """
    text = answer.strip().rstrip(".").strip()
    if len(text) > _LONGEST:
        return text
    for written, meant in _SAME:
        text = text.replace(written, meant)
    for mark in _DROPPED:
        text = text.replace(mark, "")
    text = _UNIT.sub("", text)
    while (plain := _WRAPPED.sub(r"\1", text)) != text:
        text = plain
    text = _NAMED.sub("", text)
    text = _BARE_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text)
    number = _value(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    return text if number is None else str(number)


def _value(text: str) -> Fraction | None:
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if match := _RATIO.fullmatch(text):
        return _quotient(Fraction(match[1]), Fraction(match[2]))
    if match := _FRACTION.fullmatch(text):
        value = _quotient(Fraction(match[2]), Fraction(match[3]))
        return -value if value is not None and match[1] == "-" else value
    return None


def _quotient(above: Fraction, below: Fraction) -> Fraction | None:
    return above / below if below else None
