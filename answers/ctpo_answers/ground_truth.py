"""Finds ground truths that no correct answer can match, before anything is scored against them."""

from __future__ import annotations

import re
from typing import Any

from ctpo_answers import expressions
from ctpo_answers.expressions import latex
from ctpo_answers.layout import as_one_number, plain
from ctpo_answers.reading import is_date, leaves, read
from ctpo_answers.readings import Formula, Quantity, Reading, Species, Wording
from ctpo_answers.scoring import CPU_S, ProcessorTimeError, cpu_limit, score_math

_DIGITS = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")
_TYPED = re.compile(r"(?:[+-]?\d+(?:\.\d+)? ?)?[A-Za-z][A-Za-z /]*")
_NUMBER = re.compile(r"\d+")
_GIVEN = "given|found|provided|available|applicable|specified|known|stated|answered|solved"
_NOTHING = re.compile(
    r"none|null|nil|nan|not a number|missing|error|tb[ad]|todo|idk|placeholder|omitted|n/?\.?a|"
    rf"(?:(?:the )?(?:answers?|solution) )?(?:not ?|un)(?:{_GIVEN})(?: answer)?|"
    rf"no(?: numerical| final| correct)? ?(?:answer|response|result)(?: (?:{_GIVEN}))?|"
    r"(?:the )?(?:answer|solution|proof)(?: omitted| required| needed)?|answers(?: will)? vary|"
    r"see \D+|same as (?:above|before|previous)|to be (?:determined|done|added)|(?:i )?(?:do not|don't) know|"
    r"(?:unable to|cannot) answer|(?:i am |i'm )?(?:sorry|not sure)|refer to \D+|as (?:shown|above|below|follows).*|"
    r"left (?:as an exercise|to the reader)|attached|pending|"
    r"(?:\u7b54\u6848|\u89e3|\u8bc1\u660e)?\u7565\u3002?|\u8be6?\u89c1.+|\u540c\u4e0a|\u6682(?:\u65e0|\u7f3a).*|\u5982\u56fe.*"
)
"""Words for there being no answer."""
_DECIMAL_COMMA = re.compile(
    r"(?:\text\{Rs\.?\s*\}|\\(?:dollar|euro|pounds|yen))\s*-?\d+,\d+|"
    r"[^\d,;()\[\]{}^_]*(?<![^\W\d_])(?:0,\d{2,}|\d+(?:\.\d{3})+,\d+|\d+,\d+(?=.*?(?:[%^]|[^\W\d_])))"
    r"(?:[^\d,;(\[]*?)(?:\^(?:\d|\{\d\}|\\circ.*))?"
)
"""Where a comma is hardly one between two numbers: 0,25, 1.234,56, and one quantity with a unit, a percent sign or a
sign of money."""
_SENTENCE_WORDS = 5
_CHANGES = 4
"""Numbers of a formula that are changed to see whether they are read, of those that are not seen in what was read."""


def ground_truth_problem(answer: str) -> str:
    """Return why `score_math` would judge answers to this ground truth wrongly, or "".

    >>> ground_truth_problem("unknown"), ground_truth_problem("5 kV")
    ('is no answer', '')

    It must be an answer, rather than a text around one or a word for there being none. It must score 1 against itself
    in other spellings of its type. With another number, or its letters in another order, it must be another answer.
    """
    if "####" in answer:
        final = answer.rsplit("####", 1)[1].strip()
        return f"holds a worked solution (GSM8K): keep what follows `####`, here {final!r}"
    if not any(character.isalnum() for character in answer) or _is_nothing(answer):
        return "is no answer"
    number = as_one_number(answer)
    if _DECIMAL_COMMA.fullmatch(plain(answer)) or re.search(r"\d\.\d", number):
        return "can be a number with a decimal comma, or two numbers: write `3.5` or `3{,}5`, or a blank as in `3, 5`"
    if number:
        return f"can be one number, or several numbers: write {number!r}, or blanks after the commas"
    try:
        with cpu_limit(CPU_S / 2):  # another spelling may take longer
            reading = read(answer)
            if not _is_right(answer, answer):
                return "scores 0 against itself: its brackets do not match, so that it cannot stand in a box"
            return next(filter(None, map(_part_problem, leaves(reading))), "") or _trial_problem(answer, reading)
    except ProcessorTimeError:
        return f"takes more than {CPU_S / 2:g} s of processor time to compare with itself"
    except Exception as error:  # math-verify raises any exception of sympy, antlr and its own code
        return f"cannot be compared with itself: {type(error).__name__}: {error}"


def _is_right(answer: str, gold: str) -> bool:
    return score_math(f"\\boxed{{{answer}}}", gold) == 1


def _trial_problem(answer: str, reading: Reading) -> str:
    """Which other spelling of the answer is judged wrongly, or ""."""
    if isinstance(reading, Quantity) and reading.unit and not _is_right(number := latex(reading.value), answer):
        return f"is read as the number {number} with the unit {reading.unit}, and its number alone scores 0"
    if isinstance(reading, Quantity | Wording | Species) and _TYPED.fullmatch(answer):
        if not _is_right(rf"\text{{{answer}}}", answer):
            return f"is read as {reading}, and \\text{{{answer}}} scores 0"
        backwards = answer[::-1]
        if answer.isalpha() and backwards.casefold() != answer.casefold() and _is_right(backwards, answer):
            return f"is read as a product of letters, since {backwards} scores 1: write the word in \\text{{}}"
    if _DIGITS.fullmatch(answer) and _is_right(f"{answer[:-1]}{(int(answer[-1]) + 1) % 10}", answer):
        return f"is read as {reading}, and a number with another last digit scores 1"
    return ""


def _is_nothing(answer: str) -> bool:
    """Whether it is a word for there being no answer."""
    text = re.sub(r"\\[a-zA-Z]+|[{}()\[\]$<>*_\"?!:-]", " ", answer.replace("\u2019", "'"))
    words = re.sub(r"\.(?=\s|$)", " ", text).casefold().split()
    if words == ["na"]:
        return "NA" in answer  # `Na` is sodium
    return bool(_NOTHING.fullmatch(" ".join(words)))


def _part_problem(part: Reading) -> str:
    if isinstance(part, Wording):
        return _words_problem(part)
    formula = part.value if isinstance(part, Quantity) else part
    return _formula_problem(str(formula)) if isinstance(formula, Formula) else ""


def _words_problem(words: Wording) -> str:
    numbers = re.findall(r"\d+(?:\.\d+)?", words.text)
    if len(words.text.split()) >= _SENTENCE_WORDS:
        return "is a sentence, which no model writes word for word: keep the answer alone"
    if not numbers or is_date(words):
        return ""
    if re.fullmatch(r"[\d.+-]+", words.text):
        return "is neither a number nor a date: its groups have not three digits each"
    return f"has words or signs around a number, and \\boxed{{{numbers[-1]}}} scores 0: write the answer alone"


def _formula_problem(text: str) -> str:
    found = expressions.parse(text)
    if found is None:
        return f"cannot be read: math-verify takes {text!r} for no formula, so no other spelling of it would count"
    expressions.equal(text, text)
    for number in _not_seen(text, found):
        changed = f"{text[: number.start()]}{int(number[0]) + 1}{text[number.end() :]}"
        if expressions.parse(changed) == found:
            return f"is not read to its end: math-verify reads {text!r} as {found}, without its {number[0]}"
    return ""


def _not_seen(text: str, found: Any) -> list[re.Match[str]]:
    """The first numbers of a formula that do not stand as they are in what was read of it."""
    left = expressions.integers(found)
    left.subtract(int(number) for number in _NUMBER.findall(text))
    return [number for number in _NUMBER.finditer(text) if left[int(number[0])] < 0][:_CHANGES]
