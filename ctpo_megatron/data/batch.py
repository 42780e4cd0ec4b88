"""Batch: what one training step takes, complete and scored groups of trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctpo_megatron.data.prompt import Prompt

if TYPE_CHECKING:
    from ctpo_megatron.data.trajectory import Trajectory


@dataclass(slots=True)
class Group:
    """All trajectories of one prompt: sampled, scored and trained on as a whole, never in part.

    dropped: whether a batch leaves it out of training (`rollout.uniform_groups`).
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    dropped: bool = False

    @property
    def rewards(self) -> list[float | None]:
        """Rewards in sample order, None without a verdict; raises ValueError when a trajectory was not scored."""
        missing = [t.sample_index for t in self.trajectories if t.reward is None and t.no_verdict is None]
        if missing:
            raise ValueError(f"group {self.prompt.id}: samples {missing} have no reward")
        return [None if t.reward is None else float(t.reward) for t in self.trajectories]

    @property
    def verdicts(self) -> list[float]:
        """The rewards of the trajectories that were judged, in sample order; raises ValueError as `rewards`."""
        return [reward for reward in self.rewards if reward is not None]

    @property
    def returns(self) -> list[list[float] | None]:
        """Returns to go of the turns of each trajectory, None without a verdict; raises ValueError as `rewards`."""
        return [
            None if reward is None else trajectory.returns
            for reward, trajectory in zip(self.rewards, self.trajectories, strict=True)
        ]

    def is_mixed(self, *, by_turn: bool) -> bool:
        """Whether anything can be learned from it: the rewards of two trajectories differ.

        by_turn: or what they earned from any turn on. One that ended before that turn earned 0 from there on.
        """
        if not by_turn or self.unjudged:
            return len(set(self.verdicts)) > 1
        columns = itertools.zip_longest(*(returns for returns in self.returns if returns is not None), fillvalue=0.0)
        return any(len(set(column)) > 1 for column in columns)

    @property
    def unjudged(self) -> bool:
        """Whether verdicts are missing, and no two trajectories are left to compare."""
        return len(self.verdicts) < min(2, len(self.trajectories))


@dataclass(slots=True)
class Batch:
    """The input of one training step, as `Rollouts` delivers it.

    groups: complete and scored, in the order of sampling, dropped ones included; empty on ranks other than zero, which
    receive the tokens they train on as arrays. metrics: of sampling and scoring. weight_versions: the versions that
    sampled the tokens to train on, ascending. sampler: position of the prompt stream after this batch, for checkpoints.
    """

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    weight_versions: tuple[int, ...] = ()
    sampler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> list[Group]:
        """The groups that are trained on, in the order of sampling."""
        return [group for group in self.groups if not group.dropped]

    def is_of(self, version: int) -> bool:
        """Whether these weights alone sampled the whole batch."""
        return self.weight_versions == (version,)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories that are trained on, group by group in sample order."""
        return [trajectory for group in self.trained for trajectory in group.trajectories]
