"""Dumps whose trajectories have given S_t, for what reads them by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.tracking import write_trajectories


def dump(directory: Path, step: int, walks: Sequence[Any], *, samples: int = 4, untraced: int = 0) -> None:
    """Write S_t of trajectories, `samples` of each prompt. untraced: prompts before them that no pass ran over."""
    groups, extra = list[Group](), {}
    for number in range(untraced + len(walks) // samples):
        of_prompt = [np.zeros(3)] * samples if number < untraced else walks[(number - untraced) * samples :][:samples]
        group = Group(Prompt(f"p{number}", "source", (), "1", (5, 6)), [])
        for sample, walk in enumerate(of_prompt):
            trajectory = Trajectory(f"p{number}", sample, seed=0, reward=1.0)
            trajectory.append_context([5, 6], turn=0)
            trajectory.append_model([7] * len(walk), [-0.1] * len(walk), [1] * len(walk), turn=1)
            if number >= untraced:
                curve = np.concatenate([[0.0, 0.0], walk]).astype(np.float32)
                place = sum(len(each.trajectories) for each in groups) + sample
                extra[place] = {"advantage": 1.0, **dict.fromkeys(("log_ratio", "clip_low", "clip_high"), curve)}
            group.trajectories.append(trajectory)
        groups.append(group)
    write_trajectories(directory, step, groups, lambda ids: " ".join(map(str, ids)), extra=extra)


def run_of(directory: Path, prompts: int = 0) -> RunData:
    """A run of so many prompts a mini-batch."""
    return RunData(directory, {"policy": {"mini_batch_prompts": prompts}}, {}, [], [], {})
