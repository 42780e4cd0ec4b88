"""examples/reward: a reward from a file outside of the package, in the worker processes."""

from __future__ import annotations

import asyncio

import pytest

from ctpo_megatron.data.records import Prompt, ToolCall
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.rewards import RewardPool, ScoreReport
from tests.extend.scripted import project


def answered(text: str, tokens: int, source: str = "mine", failed: bool = False) -> Group:
    trajectory = Trajectory("p", 0, 0, final_text=text)
    trajectory.append_model([1] * tokens, [-0.5] * tokens, [1] * tokens, turn=1)
    trajectory.tool_calls.append(
        ToolCall(1, "code_interpreter", {"code": "1"}, "timeout" if failed else "success", "", 0.1)
    )
    return Group(Prompt("p", source, (), "4", (), {}), [trajectory])


def test_right_answers_are_paid_and_short_ones_more() -> None:
    config = project("reward")
    groups = [
        answered(r"\boxed{4}", 256),
        answered(r"\boxed{5}", 128, failed=True),
        answered(r"\boxed{\frac{8}{2}}", 64, source="openai/gsm8k"),
    ]
    with RewardPool(config.reward, config.extensions.path) as pool:
        report = asyncio.run(pool.score(groups))
    assert [group.trajectories[0].reward for group in groups] == [pytest.approx(1.05), 0.0, 1.0]
    assert groups[0].trajectories[0].reward_components == {"right": 1.0, "short": 0.5}
    assert report == ScoreReport(3, {}, {"right": 0.5, "short": 0.625, "failed_tools": 1.0, "no_box": 0.0})
