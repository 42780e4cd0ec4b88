"""examples/turn_credit: its reward for each turn, through the worker processes, and that it learns."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from ctpo_megatron.config import load_config
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.data.records import ToolCall, ToolStatus
from ctpo_megatron.rewards import RewardPool
from tests.end_to_end.small_run import records
from tests.extend.scripted import trained
from tests.support.prefork import ROOT

FILES = (ROOT / "configs" / "quickstart.yaml", ROOT / "examples" / "turn_credit" / "turn_credit.yaml")
TWO = "Let s be the product of 12 and 34. Find the remainder when s is divided by 5."
Calls = list[tuple[ToolStatus, str]]


def answered(question: str, answer: str, calls: Calls, text: str) -> Group:
    """A turn for each call, and one for the answer."""
    prompt = Prompt("p", "toolmath", ({"role": "user", "content": question},), answer, (1,))
    trajectory = Trajectory("p", 0, 0, final_text=text)
    trajectory.append_context([1], turn=0)
    for turn, (status, output) in enumerate([*calls, (None, "")], start=1):
        trajectory.append_model([2], [-1.0], [1], turn)
        if status is not None:
            trajectory.tool_calls.append(ToolCall(turn, "code_interpreter", {"code": ""}, status, output, 0.1))
            trajectory.append_context([3], turn)
    return Group(prompt, [trajectory])


CASES: list[tuple[str, str, Calls, str, list[float]]] = [
    (TWO, "3", [("success", "408\n"), ("success", "3")], r"\boxed{3}", [1, 1, 1]),
    (TWO, "3", [("success", "408"), ("success", "81")], r"\boxed{81}", [1, 0, 0]),
    (TWO, "3", [("success", "408"), ("success", "3")], "It is 3.", [1, 1, 0]),
    (TWO, "3", [("success", "408"), ("success", "408"), ("success", "3")], r"\boxed{3}", [1, 0, 1, 1]),
    (TWO, "3", [("success", "3")], r"\boxed{3}", [0, 1]),
    (TWO, "3", [("runtime_error", "408")], r"\boxed{3}", [0, 1]),
    ("What is the sum of 78 and 43?", "121", [("success", "121")], r"\boxed{121}", [1, 1]),
    ("What is the sum of 78 and 43?", "121", [], r"\boxed{121}", [1]),
    ("What is the sum of 78 and 43?", "121", [], r"\boxed{35}", [0]),
]


def test_each_turn_earns_what_it_did() -> None:
    config = load_config(FILES[0], [str(FILES[1])])
    groups = [answered(*case[:4]) for case in CASES]
    with RewardPool(config.reward, [str(FILES[1].parent)]) as pool:
        report = asyncio.run(pool.score(groups))
    assert report.scored == len(CASES)
    for group, (question, *_, points) in zip(groups, CASES, strict=True):
        share = 1 / 3 if question == TWO else 1 / 2
        assert group.trajectories[0].turn_rewards == [share * point for point in points]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_learns(tmp_path: Path) -> None:
    run, said = trained(tmp_path, FILES, deadline_s=1400)
    metrics = records(run)
    assert "each reward with the ratio of the prefix up to the end of its turn" in said
    for name, gain in (("reward/turn/1", 0.05), ("reward/turn/2", 0.15), ("reward/answered", 0.3)):
        values = [record[name] for record in metrics[1:]]
        assert statistics.fmean(values[-5:]) >= values[0] + gain, (name, values)
    accuracy = [record["val/toolmath/acc/mean@1"] for record in (metrics[0], metrics[-1])]
    assert accuracy[1] > accuracy[0]
