"""Users' reward functions from files outside of the package, through the real worker processes."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config.schema import RewardConfig
from ctpo_megatron.data.records import Prompt, ToolCall
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.rewards import RewardPool, ScoreReport
from tests.support.deadlines import scaled
from tests.support.recorded import through_a_file

FUNCTIONS = """
    import asyncio
    from ctpo_megatron.rewards import Reward

    def everything(trajectory, prompt, *, weight=1.0):
        used = sum(call.status == "success" for call in trajectory.tool_calls)
        right = float(trajectory.final_text == prompt.answer)
        short = 1.0 - trajectory.response_tokens / prompt.extra["budget"]
        return Reward(right + weight * short, components={"right": right, "short": weight * short},
                      metrics={"calls": used, "silent": not trajectory.final_text, "tokens": len(trajectory)})

    def text(trajectory, prompt):
        assert trajectory.token_ids == [] and prompt.token_ids == () and trajectory.tool_calls
        return len(trajectory.final_text)

    text.text_only = True

    class Judge:
        made = 0

        def __init__(self, *, verdict):
            Judge.made += 1
            self.verdict = verdict

        def __call__(self, trajectory, prompt):
            return Reward(self.verdict, metrics={"made": Judge.made})

    class Remote:
        \"\"\"Each call returns only after all `expected` have arrived: they must be in flight together.\"\"\"

        def __init__(self, *, expected):
            self.expected, self.arrived, self.all_here = expected, 0, asyncio.Event()

        async def __call__(self, trajectory, prompt):
            self.arrived += 1
            if self.arrived == self.expected:
                self.all_here.set()
            await self.all_here.wait()
            return Reward(trajectory.sample_index, metrics={"together": self.arrived})
"""


def group(*texts: str, source: str = "mine") -> Group:
    prompt = Prompt("p", source, ({"role": "user", "content": "?"},), "yes", (7, 8), {"budget": 10})
    trajectories = []
    for index, text in enumerate(texts):
        call = ToolCall(1, "code_interpreter", {"code": "1"}, "success", "1", 0.1)
        trajectory = Trajectory("p", index, 0, final_text=text, tool_calls=[call])
        trajectory.append_context([7, 8], turn=0)
        trajectory.append_model([1] * (index + 1), [-0.5] * (index + 1), [1] * (index + 1), turn=1)
        trajectories.append(trajectory)
    return Group(prompt, trajectories)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(FUNCTIONS), encoding="utf-8")
    return tmp_path


def score(folder: Path, groups: list[Group], **settings: Any) -> ScoreReport:
    config = RewardConfig.model_validate({"timeout_s": scaled(20.0), **settings})
    with RewardPool(config, [str(folder)]) as pool:
        return asyncio.run(pool.score(groups))


def test_a_reward_sees_trajectory_and_prompt_and_names_its_parts(folder: Path) -> None:
    groups = [group("yes", ""), group("no", "yes")]
    function = {"name": "user_rewards:everything", "arguments": {"weight": 0.5}}
    report = score(folder, groups, function=function)
    shares = [0.5 * (1 - tokens / 10) for tokens in (1, 2, 1, 2)]
    scored = [trajectory for group in groups for trajectory in group.trajectories]
    assert [t.reward for t in scored] == [1 + shares[0], shares[1], shares[2], 1 + shares[3]]
    assert [t.reward_components for t in scored] == [
        {"right": right, "short": short} for right, short in zip((1.0, 0.0, 0.0, 1.0), shares, strict=True)
    ]
    means = {"right": 0.5, "short": pytest.approx(sum(shares) / 4), "calls": 1.0, "tokens": 3.5}
    assert report == ScoreReport(4, {}, {**means, "silent": 1.0})  # a flag is counted
    assert through_a_file(scored) == scored


def test_a_reward_for_text_only_gets_no_token_lists_and_the_trajectory_keeps_them(folder: Path) -> None:
    groups = [group("four")]
    assert score(folder, groups, function="user_rewards:text").scored == 1
    assert groups[0].trajectories[0].reward == 4.0
    assert groups[0].trajectories[0].token_ids == [7, 8, 1]


def test_each_data_source_may_have_its_own_reward(folder: Path) -> None:
    groups = [group("yes"), group(r"\boxed{yes}", "no box", source="maths"), group("long", source="length")]
    judge = {"name": "user_rewards:Judge", "arguments": {"verdict": 0.25}}
    report = score(folder, groups, by_source={"mine": judge, "other": judge, "length": "user_rewards:text"})
    assert [t.reward for g in groups for t in g.trajectories] == [0.25, 1.0, 0.0, 4.0]
    # The figures of a reward are of its own trajectories alone; one that two sources name is made once.
    assert report == ScoreReport(4, {}, {"made": 1.0, "no_box": 1.0})


def test_async_rewards_are_awaited_together(folder: Path) -> None:
    groups = [group(*"abcdefgh"), group(*"abcdefgh")]
    remote = {"name": "user_rewards:Remote", "arguments": {"expected": 16}}
    report = score(folder, groups, function=remote)
    assert report == ScoreReport(16, {}, {"together": 16.0})
    assert [t.reward for t in groups[1].trajectories] == [float(n) for n in range(8)]


def test_all_of_a_group_are_awaited_together_whatever_the_workers(folder: Path) -> None:
    remote = {"name": "user_rewards:Remote", "arguments": {"expected": 8}}
    report = score(folder, [group(*"abcdefgh")], function=remote, workers=4)
    assert report == ScoreReport(8, {}, {"together": 8.0})


def test_no_more_than_so_many_are_awaited_together(folder: Path) -> None:
    remote = {"name": "user_rewards:Remote", "arguments": {"expected": 5}}
    report = score(folder, [group(*"abcdefgh")], function=remote, concurrency=4, timeout_s=scaled(3.0))
    # The fourth and earlier calls wait for a fifth, which comes once they were given up.
    assert report == ScoreReport(4, {"timeout": 4}, {"together": pytest.approx(6.5)})
