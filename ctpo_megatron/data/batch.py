"""Batch: what one training step takes, complete and scored groups of trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory


@dataclass(slots=True)
class Group:
    """The n trajectories of one prompt: the unit of commit, never partial."""

    prompt: Prompt
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float]:
        """Rewards in sample order; raises ValueError when a trajectory was not scored."""
        missing = [t.sample_index for t in self.trajectories if t.reward is None]
        if missing:
            raise ValueError(f"group {self.prompt.id}: samples {missing} have no reward")
        return [float(t.reward) for t in self.trajectories]  # type: ignore[arg-type]


@dataclass(slots=True)
class Batch:
    """What a rollout source hands over for one training step.

    groups: complete and scored; empty on ranks other than zero, which get the tokens they train on as arrays.
    metrics: of sampling and scoring. weight_versions: the versions that sampled its tokens, ascending.
    sampler: position of the prompt stream after this batch, as a checkpoint keeps it. dropped: scored groups that are
    not trained on, by their place among all groups in the order of sampling.
    """

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    weight_versions: tuple[int, ...] = ()
    sampler: Mapping[str, Any] = field(default_factory=dict)
    dropped: Mapping[int, Group] = field(default_factory=dict)

    @property
    def sampled(self) -> list[Group]:
        """All groups in the order of sampling, those that are not trained on included."""
        trained = iter(self.groups)
        count = len(self.groups) + len(self.dropped)
        return [self.dropped[place] if place in self.dropped else next(trained) for place in range(count)]

    def is_of(self, version: int) -> bool:
        """Whether these weights, and no others, sampled the whole of it."""
        return self.weight_versions == (version,)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group in sample order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]
