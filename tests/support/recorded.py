"""Trajectories with everything that one may have, and through a file and back."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ctpo_megatron.base.run_paths import AHEAD
from ctpo_megatron.data import Group, Prompt, ToolCall, Trajectory
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.data.tokens import ROUTER_CHOICES
from ctpo_megatron.data.trajectory_file import encode_ahead, read_ahead


def through_a_file(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """As a checkpoint keeps them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / AHEAD).write_bytes(encode_ahead({"kept": [*trajectories]}))
        kept: list[Trajectory] = (read_ahead(Path(folder)) or {})["kept"]
    return kept


def groups_of_a567bdb6() -> list[Group]:
    """What is in `dump_a567bdb6.parquet`, written by that commit; its texts are `chr` of the token ids."""
    made = []
    for sample in range(4):
        trajectory = Trajectory("p-1", sample, seed=2**62 + sample, finish_reason="answer", final_text="naïve €")
        trajectory.append_context([65, 66, 10], 0)
        trajectory.append_model([97, 0x20AC, 98], [-0.1, -1e-30, 0.0], [3, 3, 4], 1)
        trajectory.append_context([67, 10], 1)
        trajectory.append_model([99, 100], [-7.25, -np.float32(1 / 3)], [4, 4], 2)
        made.append(trajectory)
    first, second, third, _ = made
    calls = [
        ToolCall(1, "python", {"code": "print('é')", "n": [1, None]}, "success", "é\n", 0.1, 0.05, 1.7e9),
        ToolCall(2, "", {}, "parse_error", "", 0.0),
    ]
    first.tool_calls, first.reward, first.reward_components = calls, 1 / 3, {"format": 0.1, "answer": -0.0}
    first.turn_rewards, first.scored_at = [0.25, 1e-17], [1.7e9 + 1 / 3, 1.7e9 + 1]
    first.fill(0, {ROUTER_CHOICES: np.arange(10 * 2 * 2, dtype=np.uint16).reshape(10, 2, 2)})
    second.no_verdict, second.finish_reason = NoVerdict("timeout", "later than 10 s"), "length"
    second.loss_mask = [0] * 10
    third.sequence_starts, third.reward, third.finish_reason = [3, 8], 0.0, None
    third.fill(4, {"scores": np.ones(2, np.float16), "wide": np.ones((2, 3), np.int64)})
    return [Group(Prompt("p-1", "test", (), "4", ()), made)]
