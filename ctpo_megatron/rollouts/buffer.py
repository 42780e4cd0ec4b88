"""A batch from the draw of its prompts until the trainer takes it: which groups it keeps, how a checkpoint has it."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.rollouts.filters import Filters

Slot = tuple[int, int]
"""RL step, and number of the group among those drawn for it."""


class UniformGroups:
    """`rollout.uniform_groups` of one step: what becomes of groups whose rewards are all equal.

    mini_batch_prompts: groups of one optimizer step. refills: rounds that were drawn. by_turn: whether the rewards of
    turns are trained on.
    """

    def __init__(
        self, config: RolloutConfig, mini_batch_prompts: int, refills: int = 0, *, by_turn: bool = False
    ) -> None:
        self._config, self._size, self._by_turn = config, mini_batch_prompts, by_turn
        self.refills = refills

    def is_uniform(self, group: Group) -> bool:
        """Whether all rewards that are trained on, shaping included, are equal: every advantage is 0 then.

        So is a group of fewer than two verdicts, which has no advantage at all.
        """
        return not group.is_mixed(by_turn=self._by_turn)

    def missing(self, groups: Sequence[Group]) -> int:
        """How many prompts to draw for another round of refills, given all scored groups; 0: the batch is complete."""
        if self._config.uniform_groups != "refill" or self.refills == self._config.max_refills:
            return 0
        missing = self._config.prompts_per_step - sum(not self.is_uniform(group) for group in groups)
        self.refills += missing > 0
        return missing

    def drop(self, groups: Sequence[Group]) -> None:
        """Set `dropped` of the uniform groups that are not trained on, given all sampled ones.

        As many stay, the last ones, as the last optimizer step needs to be full; at least one step is made. Groups
        without verdicts to compare are the first to leave.
        """
        if self._config.uniform_groups == "keep":
            return
        uniform = sorted((group for group in groups if self.is_uniform(group)), key=lambda group: not group.unjudged)
        mixed = len(groups) - len(uniform)
        steps = max(1, math.ceil(mixed / self._size))
        count = len(groups) - steps * self._size
        for group in uniform[:count]:
            group.dropped = True

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """`rollout/groups_uniform` (share of the sampled groups), `rollout/groups_dropped`, and `rollout/refills` where
        there can be any; nothing when all groups are kept. Comes after `drop`."""
        if self._config.uniform_groups == "keep":
            return {}
        share = sum(map(self.is_uniform, groups)) / len(groups)
        dropped = sum(group.dropped for group in groups)
        refills = {"rollout/refills": float(self.refills)} if self._config.uniform_groups == "refill" else {}
        return {"rollout/groups_uniform": share, "rollout/groups_dropped": float(dropped), **refills}


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
        self._occurrences: dict[int, int] = {}
        self._draws: Counter[str] = Counter()
        self.batch: Batch | None = None
        self.late: list[Prompt] = []
        self.late_groups = 0
        self._began = time.monotonic()
        self.seconds = 0.0

    def occurrence(self, index: int, prompt: Prompt) -> int:
        """How often the step has drawn the prompt before, now that it is to be sampled as group `index`.

        Groups that a resumed run samples again keep their numbers. A number of a discarded group is not given again.
        """
        if self.waiting.get(index) != prompt:
            self._occurrences[index] = self._draws[prompt.id]
            self._draws[prompt.id] += 1
        return self._occurrences[index]

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

    def assemble(self, metrics: Mapping[str, float], filters: Filters) -> Batch:
        """The batch of the scored groups, given the metrics of sampling and scoring. Some groups are dropped, loss
        masks are written."""
        groups = self.groups
        self.uniform.drop(groups)
        batch = Batch(groups, dict(metrics))
        repeated = len(groups) - len({group.prompt.id for group in groups})
        batch.metrics["rollout/prompts_repeated"] = float(repeated)
        batch.metrics |= self.uniform.metrics(groups) | filters.apply(batch.trained)
        versions = set[int]().union(*(np.unique(t.tokens["weight_version"]).tolist() for t in batch.trajectories))
        batch.weight_versions = tuple(sorted(version for version in versions if version >= 0))
        return batch

    def state_dict(self, in_flight: Mapping[Slot, Prompt], report_record: Any) -> dict[str, Any]:
        """As a checkpoint keeps it: groups that are scored whole, of the others the prompt and which draw it is.

        All is JSON but the trajectories.
        """
        records: list[dict[str, Any]] = []
        for index in range(self.drawn):
            if (group := self.scored.get(index)) is None:
                records.append({"prompt": in_flight[self.step, index].id, "occurrence": self._occurrences[index]})
                continue
            trajectories = [copy.copy(trajectory) for trajectory in group.trajectories]  # filters will set masks
            report = report_record(self.reports[index])
            records.append({"prompt": group.prompt.id, "trajectories": trajectories, "report": report})
        draws = dict(self._draws)
        return {"step": self.step, "refills": self.uniform.refills, "draws": draws, "groups": records}

    def load_groups(self, state: Mapping[str, Any], prompts: Mapping[str, Prompt], report_of: Any) -> None:
        """Take in the groups of a `state_dict`."""
        records = state["groups"]
        self.drawn = len(records)
        self._draws = Counter(state.get("draws", {}))  # older checkpoints do not have them
        for index, record in enumerate(records):
            prompt = prompts[record["prompt"]]
            if "trajectories" not in record:
                self.waiting[index], self._occurrences[index] = prompt, record.get("occurrence", 0)
                continue
            group = Group(prompt, list(record["trajectories"]))
            self.add(index, group, report_of(record["report"]))
