"""The batches that are sampled ahead of the trainer: what of each is scored, and how a checkpoint keeps it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.rollouts.groups import UniformGroups

Place = tuple[int, int]
"""RL step, and number of the group among those drawn for it."""


class OpenBatch:
    """The groups of one step from the draw of their prompts until the trainer takes them.

    drawn: prompts so far. scored: complete groups by place, with the report of their scoring in `reports`. waiting:
    prompts that a resumed run has to play again. batch: what the trainer gets, once nothing is missing.
    """

    def __init__(self, step: int, uniform: UniformGroups) -> None:
        self.step, self.uniform = step, uniform
        self.drawn = 0
        self.scored: dict[int, Group] = {}
        self.reports: dict[int, Any] = {}
        self.waiting: dict[int, Prompt] = {}
        self.batch: Batch | None = None
        self._began = time.monotonic()
        self.seconds = 0.0

    def add(self, place: int, group: Group, report: Any) -> None:
        """A group is scored."""
        self.scored[place], self.reports[place] = group, report
        self.seconds = time.monotonic() - self._began

    def keep_first(self, count: int) -> list[Prompt]:
        """Nothing but the groups that were scored first is part of it; the prompts of the other scored ones."""
        first = sorted(list(self.scored)[:count])
        others = [group.prompt for place, group in self.scored.items() if place not in first]
        self.reports = {number: self.reports[place] for number, place in enumerate(first)}
        self.scored = {number: self.scored[place] for number, place in enumerate(first)}
        self.drawn = len(first)
        return others

    @property
    def groups(self) -> list[Group]:
        """Those that are scored, in the order of sampling."""
        return [self.scored[place] for place in sorted(self.scored)]

    @property
    def ordered_reports(self) -> list[Any]:
        """Of the scoring of `groups`."""
        return [self.reports[place] for place in sorted(self.reports)]

    def state_dict(self, in_flight: Mapping[Place, Prompt], report_record: Any) -> dict[str, Any]:
        """As a checkpoint keeps it: groups that are scored whole, of the others the prompt."""
        records: list[dict[str, Any]] = []
        for place in range(self.drawn):
            if (group := self.scored.get(place)) is None:
                records.append({"prompt": in_flight[self.step, place].id})
                continue
            trajectories = [trajectory.to_json() for trajectory in group.trajectories]
            report = report_record(self.reports[place])
            records.append({"prompt": group.prompt.id, "trajectories": trajectories, "report": report})
        return {"step": self.step, "refills": self.uniform.refills, "groups": records}

    def load_groups(self, records: Sequence[Mapping[str, Any]], prompts: Mapping[str, Prompt], report_of: Any) -> None:
        """Take in the groups of a `state_dict`."""
        self.drawn = len(records)
        for place, record in enumerate(records):
            prompt = prompts[record["prompt"]]
            if "trajectories" not in record:
                self.waiting[place] = prompt
                continue
            group = Group(prompt, [Trajectory.from_json(trajectory) for trajectory in record["trajectories"]])
            self.add(place, group, report_of(record["report"]))
