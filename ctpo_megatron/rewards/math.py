"""Reward functions for mathematical answers; `ctpo_answers` says whether an answer is right."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ctpo_answers import ProcessorTimeError, answer_part, cpu_limit, last_boxed, score_math, score_reference
from ctpo_megatron.rewards.protocol import Reward

if TYPE_CHECKING:
    from ctpo_megatron.data.records import Prompt
    from ctpo_megatron.data.trajectory import Trajectory


class MathVerify:
    """The reward function `math_verify`: `score_math` of the final turn. Tool output and earlier turns never count.

    An answer that cannot be compared in two seconds of processor time is wrong: the ground truth was, when it was read.
    Its metrics: `no_box` counts final turns without a complete `\\boxed{...}`, `uncomputable` such answers.
    """

    text_only = True

    def __init__(self, *, box_in_thinking: bool = True) -> None:
        """Import math-verify and build its grammar, so that the first answer does not have to wait for it."""
        self._box_in_thinking = box_in_thinking
        score_math("\\boxed{\\sqrt{4}}", "\\pi")

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Reward:
        text = answer_part(trajectory.final_text, box_in_thinking=self._box_in_thinking)
        try:
            with cpu_limit():
                return Reward(score_math(text, prompt.answer), metrics={"no_box": last_boxed(text) is None})
        except ProcessorTimeError:
            return Reward(0.0, metrics={"no_box": False, "uncomputable": True})


class ReferenceMath:
    """The reward function `REFERENCE`: `score_reference` of `final_text`, which must be the whole response."""

    text_only = True

    def __init__(self) -> None:
        """Import math-verify now, so that the first answer does not have to wait for it."""
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # its parser warns that it has no time limit
        score_reference("1", "\\pi")

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Reward:
        return Reward(score_reference(trajectory.final_text, prompt.answer))
