"""A reward function that does not always judge: in every way in which it can fail but by being late."""

from __future__ import annotations

import os
import random
from typing import Any

from ctpo_megatron.rewards import Reward


def judge(trajectory: Any, _prompt: Any, *, fails: float, seed: int = 0) -> Any:
    """1 for a response of odd length, else 0; at random, for a share of `fails`, no verdict."""
    # By the trajectory, not by the worker: one that is replaced would begin anew.
    dice = random.Random(f"{seed} {trajectory.seed} {trajectory.prompt_id} {trajectory.sample_index}")
    if dice.random() >= fails:
        odd = float(trajectory.response_tokens % 2)
        return Reward(odd, components={"odd": odd})
    match dice.randrange(10):
        case 0:
            os._exit(1)
        case 1 | 2 | 3:
            return None
        case 4 | 5 | 6:
            return Reward(float("nan"))
        case _:
            raise ConnectionError("the judge does not answer")
