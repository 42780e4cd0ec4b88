"""Scores a mathematical answer: compares the last box of the final turn with the ground truth."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ctpo_megatron.rewards.protocol import Reward

if TYPE_CHECKING:
    from ctpo_megatron.data.prompt import Prompt
    from ctpo_megatron.data.trajectory import Trajectory

_BOX = "\\boxed{"


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{...}` in `text`, braces balanced; None when there is none.

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


def score_math(final_text: str, answer: str) -> float:
    """1.0 when math-verify finds the last box of `final_text` equal to `answer`, else 0.0.

    Sets no time limit: math-verify's own uses signal alarms, which cannot stop a loop in C. Run it in a process that
    can be killed (RewardPool). Raises ValueError when `answer` itself cannot be read, and any exception of
    math-verify's comparison. A prediction that cannot be parsed is a wrong answer, not an error.
    """
    from math_verify import verify

    box = last_boxed(final_text)
    if box is None or not box.strip():
        return 0.0
    gold = parse_expression(answer)
    if not gold:
        raise ValueError(f"math-verify cannot read the ground truth {answer!r}")
    return float(verify(gold, parse_expression(box, raise_on_error=False), timeout_seconds=None, raise_on_error=True))


def parse_expression(expression: str, *, raise_on_error: bool = True) -> list[object]:
    """The result of math-verify's parser: an expression and its text, the text alone, or nothing."""
    from math_verify import LatexExtractionConfig, parse

    found: list[object] = parse(
        f"\\boxed{{{expression}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        parsing_timeout=None,
        raise_on_error=raise_on_error,
    )
    return found


class MathVerify:
    """The reward function `math_verify`: `score_math` of the final turn. Tool output and earlier turns never count.

    Its metric `no_box` counts final turns without a complete `\\boxed{...}`.
    """

    text_only = True

    def __init__(self) -> None:
        """Import math-verify and build its grammar, so that the first answer does not have to wait for it."""
        # Hides its warning that timeouts are off, as intended here.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        score_math("\\boxed{1}", "1")

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Reward:
        text = trajectory.final_text
        return Reward(score_math(text, prompt.answer), metrics={"no_box": last_boxed(text) is None})


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
