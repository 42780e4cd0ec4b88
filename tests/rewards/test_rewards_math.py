"""The reward function `math_verify`: which box counts, and what it counts itself."""

from __future__ import annotations

import pytest

from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.rewards import MathVerify


@pytest.mark.parametrize(
    ("text", "in_thinking", "outside", "no_box"),
    [
        (r"\boxed{5}", 1, 1, (False, False)),
        (r"<think>\boxed{5}</think>I do not know.", 1, 0, (False, True)),
        (r"<think>\boxed{5}</think>It is \boxed{4}.", 0, 0, (False, False)),
        (r"<think>first guess \boxed{5}, let me check", 0, 0, (True, True)),
    ],
)
def test_a_box_in_thinking_counts_unless_that_is_turned_off(
    text: str, in_thinking: float, outside: float, no_box: tuple[bool, bool]
) -> None:
    trajectory, prompt = Trajectory("p", 0, 0, final_text=text), Prompt("p", "s", (), "5", ())
    scored = [MathVerify(box_in_thinking=counts)(trajectory, prompt) for counts in (True, False)]
    assert [reward.value for reward in scored] == [in_thinking, outside]
    assert tuple(reward.metrics["no_box"] for reward in scored) == no_box
