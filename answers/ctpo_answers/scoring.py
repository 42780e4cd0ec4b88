"""Scores a mathematical answer: compares the last box of the final turn with the ground truth."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from ctpo_answers.comparison import same_answer
from ctpo_answers.layout import plain

_OPEN, _CLOSE = "<think>", "</think>"
_BOX = "\\boxed{"
CPU_S = 2.0
"""Seconds of processor time in which an answer is compared."""
AGAIN_S = 0.1
"""Between two attempts to end a comparison."""


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete `\\boxed{...}` in `text`, braces balanced; None when there is none.

    `text` must be the model's final turn. A later box that is never closed does not hide an earlier complete one.
    Braces escaped with a backslash are part of the content and are not counted.
    """
    start = text.rfind(_BOX)
    while start >= 0:
        end = _closing_brace(text, start + len(_BOX))
        if end is not None:
            return text[start + len(_BOX) : end]
        start = text.rfind(_BOX, 0, start)
    return None


def answer_part(final_text: str, *, box_in_thinking: bool = True) -> str:
    """Return the part of a final turn in which a box counts: nothing of one that ends within its thinking.

    box_in_thinking: whether thinking that has ended counts, too.
    """
    before, closed, after = final_text.rpartition(_CLOSE)
    if _OPEN in after:
        return ""
    return after if closed and not box_in_thinking else before + closed + after


def score_math(final_text: str, answer: str) -> float:
    """Return 1.0 when the last box of `final_text` is the answer `answer` (`same_answer`), else 0.0.

    >>> score_math("It is \\\\boxed{0.5}.", "\\\\frac12")
    1.0

    Thinking that never ended earns nothing. A box counts in thinking that has ended, where none follows it.

    Sets no time limit: math-verify's own uses signal alarms, which cannot stop a loop in C. Run it in a process that
    can be killed, or in `cpu_limit`. Raises ValueError when `answer` itself cannot be read, and any exception of
    math-verify's comparison. A prediction that cannot be parsed is a wrong answer, not an error.
    """
    box = last_boxed(answer_part(final_text))
    if not plain(answer):
        raise ValueError(f"cannot read the ground truth {answer!r}")
    return float(box is not None and bool(box.strip()) and same_answer(answer, box))


class ProcessorTimeError(BaseException):
    """A comparison has taken its processor time. No Exception, as libraries catch those on the way."""


@contextlib.contextmanager
def cpu_limit(seconds: float = CPU_S) -> Iterator[None]:
    """Raise ProcessorTimeError after this much processor time of the process, as soon as its code in C returns.

    A machine that stops for a while does not count. Sets no limit outside the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise ProcessorTimeError

    before = signal.signal(signal.SIGPROF, stop)
    # Again and again: Python drops what is raised within a destructor or a callback of its garbage collector.
    signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:  # also where the signal came just before
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
        position += 1
    return None
