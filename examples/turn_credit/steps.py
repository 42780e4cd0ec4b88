"""A reward for each turn of the quickstart: a point for a call that printed the right number, one for the answer.

    ctpo train configs/quickstart.yaml examples/turn_credit/turn_credit.yaml

Two of three points are earned before the answer where a question needs two calls: "Let s be the product of 12 and 34.
Find the remainder when s is divided by 5." A model that calls the right program first and a wrong one then keeps the
point of the first call, and only the second turn is worse than the others of its group. All points together are 1.
"""

from __future__ import annotations

import re

from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.rewards import Reward, last_boxed

TWO_CALLS = "Let s be the product of "


def right_outputs(prompt: Prompt) -> list[str]:
    """What the program of each call has to print, in order; the last is the answer."""
    question = prompt.messages[-1]["content"]
    if not question.startswith(TWO_CALLS):
        return [prompt.answer]
    first, second, *_ = map(int, re.findall(r"\d+", question))
    return [str(first * second), prompt.answer]


def score(trajectory: Trajectory, prompt: Prompt) -> Reward:
    """One number for each model turn. A call earns a point when it prints the next right number."""
    wanted, turns = right_outputs(prompt), [0.0] * trajectory.turns
    point = 1 / (len(wanted) + 1)
    for call in trajectory.tool_calls:
        if wanted and call.status == "success" and call.output.strip() == wanted[0]:
            turns[call.turn - 1] = point
            del wanted[0]
    answered = last_boxed(trajectory.final_text) == prompt.answer
    turns[-1] += point * answered
    return Reward(turns=turns, metrics={"answered": float(answered)})
