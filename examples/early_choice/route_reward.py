"""A reward for questions whose first call is free: 1 for the answer of the better route, less for the other's.

    python -m examples.toolmath data/early_choice --early-choice
    ctpo train configs/quickstart.yaml examples/early_choice/early_choice.yaml

"Let s be the sum or the product of 12 and 34. Find the remainder of a sum, or the integer part of a product, divided by
56." After `12+34` the answer 46%56 is right and worth .6, after `12*34` the answer 408//56 is right and worth 1. A
second call that belongs to the other first call earns nothing, so what is right later depends on the early choice.
"""

from __future__ import annotations

from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.rewards import Reward, last_boxed


def score(trajectory: Trajectory, prompt: Prompt) -> Reward:
    """Return what the boxed answer is worth; metrics: whether it was that of the better route, and of any route."""
    answer = last_boxed(trajectory.final_text)
    better, lesser = answer == prompt.answer, answer == prompt.extra["lesser_answer"]
    value = 1.0 if better else prompt.extra["worth"] if lesser else 0.0
    return Reward(value, metrics={"better_route": float(better), "right": float(better or lesser)})
