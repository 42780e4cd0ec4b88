"""A batch from the draw of its prompts until the trainer takes it, and how a checkpoint keeps it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.rollouts.groups import UniformGroups

Slot = tuple[int, int]
"""RL step, and number of the group among those drawn for it."""


class OpenBatch:
    """The groups of one step from the draw of their prompts until the trainer takes them.

    drawn: prompts so far. scored: complete groups by index, in the order of scoring, with the report of their scoring
    in `reports`. waiting: prompts that a resumed run has to sample again. late: prompts whose groups are discarded;
    late_groups: their number in all. batch: what the trainer gets, once nothing is missing. seconds: sampling took.
    """

    def __init__(self, step: int, uniform: UniformGroups) -> None:
        self.step, self.uniform = step, uniform
        self.drawn = 0
        self.scored: dict[int, Group] = {}
        self.reports: dict[int, Any] = {}
        self.waiting: dict[int, Prompt] = {}
        self.batch: Batch | None = None
        self.late: list[Prompt] = []
        self.late_groups = 0
        self._began = time.monotonic()
        self.seconds = 0.0

    def add(self, index: int, group: Group, report: Any) -> None:
        """A group is scored."""
        self.scored[index], self.reports[index] = group, report

    def note_sampled(self) -> None:
        """A group is complete."""
        self.seconds = time.monotonic() - self._began

    def keep_first(self, count: int) -> list[Prompt]:
        """Nothing but the groups that were scored first is part of it; the prompts of the other scored ones."""
        first = sorted(list(self.scored)[:count])
        others = [group.prompt for index, group in self.scored.items() if index not in first]
        self.reports = {number: self.reports[index] for number, index in enumerate(first)}
        self.scored = {number: self.scored[index] for number, index in enumerate(first)}
        self.drawn = len(first)
        return others

    @property
    def groups(self) -> list[Group]:
        """Those that are scored, in the order of sampling."""
        return [self.scored[index] for index in sorted(self.scored)]

    @property
    def ordered_reports(self) -> list[Any]:
        """Of the scoring of `groups`."""
        return [self.reports[index] for index in sorted(self.reports)]

    def state_dict(self, in_flight: Mapping[Slot, Prompt], report_record: Any) -> dict[str, Any]:
        """As a checkpoint keeps it: groups that are scored whole, of the others the prompt."""
        records: list[dict[str, Any]] = []
        for index in range(self.drawn):
            if (group := self.scored.get(index)) is None:
                records.append({"prompt": in_flight[self.step, index].id})
                continue
            trajectories = [trajectory.to_json() for trajectory in group.trajectories]
            report = report_record(self.reports[index])
            records.append({"prompt": group.prompt.id, "trajectories": trajectories, "report": report})
        return {"step": self.step, "refills": self.uniform.refills, "groups": records}

    def load_groups(self, records: Sequence[Mapping[str, Any]], prompts: Mapping[str, Prompt], report_of: Any) -> None:
        """Take in the groups of a `state_dict`."""
        self.drawn = len(records)
        for index, record in enumerate(records):
            prompt = prompts[record["prompt"]]
            if "trajectories" not in record:
                self.waiting[index] = prompt
                continue
            group = Group(prompt, [Trajectory.from_json(trajectory) for trajectory in record["trajectories"]])
            self.add(index, group, report_of(record["report"]))
