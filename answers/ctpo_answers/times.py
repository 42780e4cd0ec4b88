"""Times of the day: `3:30 p.m.`, `noon`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ctpo_answers.layout import lower_words

_NOON = 12 * 3600
_TIME = re.compile(
    r"(?:at )?(?P<hour>\d{1,2})(?: ?: ?(?P<minute>[0-5]\d)(?: ?: ?(?P<second>[0-5]\d))?)?(?: oclock)?"
    r" ?(?P<half>[ap]\.? ?m\b\.?|in the (?:morning|afternoon|evening)|noon|midnight)"
)
_ZEROS = (Fraction(0), Fraction(0))
_WORDS = {"noon": _NOON, "midday": _NOON, "midnight": 0}
_MIDNIGHT = re.compile(r"(?:24|0?0) ?: ?00(?: ?: ?00)?")


@dataclass(frozen=True, slots=True)
class TimeOfDay:
    """A time that says in which half of the day it is.

    seconds: since midnight. shown: the numbers on the clock as written; none for a word.
    """

    seconds: int
    shown: tuple[int, ...] = ()

    def __str__(self) -> str:
        hour, rest = divmod(self.seconds, 3600)
        minute, second = divmod(rest, 60)
        return f"{hour}:{minute}" + f":{second}" * (second > 0) + " am" * (0 < hour < 12)

    def is_at(self, clock: Sequence[Fraction]) -> bool:
        """Return whether hours, minutes and seconds without a.m. and p.m. say this time.

        From 13 on, and at 0, hours are counted to 24. Others leave out the half of the day; 12:30 is after noon.
        """
        hour, minute, second = (*clock, *_ZEROS)[:3]
        if len(clock) > 1 and (hour == 0 or 12 < hour < 24):
            return self.seconds == hour * 3600 + minute * 60 + second and minute < 60
        shown = (*self.shown, *_ZEROS)[: max(len(clock), len(self.shown), 2 - len(self.shown))]
        return tuple(clock) == shown and not (hour == 12 and self.seconds < _NOON)


def time(text: str) -> TimeOfDay | None:
    """Return the time that a whole text says; None where it says none, or leaves out the half of the day."""
    words = lower_words(text)
    if _MIDNIGHT.fullmatch(words):
        return TimeOfDay(0)
    if (word := words.removeprefix("at ")) in _WORDS:
        return TimeOfDay(_WORDS[word])
    found = _TIME.fullmatch(words)
    if found is None:
        return None
    shown = tuple(int(part) for part in found.group("hour", "minute", "second") if part)
    hour, half = shown[0], found["half"]
    if half in _WORDS:
        return TimeOfDay(_WORDS[half], shown) if hour == 12 and not any(shown[1:]) else None
    after_noon = half[0] == "p" or half.endswith(("afternoon", "evening"))
    if hour > 12:  # 15:30 p.m.
        return TimeOfDay(_seconds(*shown), shown) if after_noon and hour < 24 else None
    return TimeOfDay(_seconds(hour % 12 + 12 * after_noon, *shown[1:]), shown) if hour else None


def _seconds(hour: int, minute: int = 0, second: int = 0) -> int:
    return hour * 3600 + minute * 60 + second
