"""A batch from the draw of its prompts until the trainer takes it: which groups it keeps, how a checkpoint has it."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.rollouts.filters import Filters


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

    drawn: prompts, by number of the draw. groups: those that are scored, by that number, in the order of scoring, with
    the reports of their scoring. sampling: groups that are not sampled yet; changed: set when that, or `groups`, has
    changed. late: groups that were not waited for. seconds: sampling took. batch: what the trainer gets; None: sampling
    has not begun, as after a resume.
    """

    def __init__(self, step: int, uniform: UniformGroups) -> None:
        self.step, self.uniform = step, uniform
        self.drawn: list[Prompt] = []
        self.groups: dict[int, Group] = {}
        self.reports: dict[int, Any] = {}
        self.sampling = self.late = 0
        self.changed = asyncio.Event()
        self.batch: asyncio.Task[Batch] | None = None
        self.seconds = 0.0
        self._occurrences: dict[int, int] = {}
        self._draws: Counter[str] = Counter()
        self._began = time.monotonic()

    def occurrence(self, number: int) -> int:
        """How often the step had drawn the prompt of this draw before; of a discarded group it is not given again."""
        if number not in self._occurrences:
            prompt = self.drawn[number].id
            self._occurrences[number] = self._draws[prompt]
            self._draws[prompt] += 1
        return self._occurrences[number]

    def replace(self, number: int, prompt: Prompt) -> None:
        """Another prompt is sampled as this draw."""
        self.drawn[number] = prompt
        self._occurrences.pop(number, None)

    @property
    def done(self) -> bool:
        """Whether the batch is complete, or has failed."""
        return self.batch is not None and self.batch.done()

    def result(self) -> Batch:
        """The complete batch; raises what has failed."""
        assert self.batch is not None
        return self.batch.result()

    def note(self, change: int) -> None:
        """More groups, or fewer, are being sampled."""
        self.sampling += change
        if change < 0:
            self.seconds = time.monotonic() - self._began
        self.changed.set()

    def add(self, number: int, group: Group, report: Any) -> None:
        """A group is scored."""
        self.groups[number], self.reports[number] = group, report

    def keep_first(self, count: int) -> int:
        """Keep the groups that were scored first, in the order of the draw; returns how many draws are dropped."""
        kept = sorted(list(self.groups)[:count])
        dropped = len(self.drawn) - len(kept)
        self.drawn = [self.drawn[number] for number in kept]
        self._occurrences = {place: self._occurrences[number] for place, number in enumerate(kept)}
        self.reports = {place: self.reports[number] for place, number in enumerate(kept)}
        self.groups = {place: self.groups[number] for place, number in enumerate(kept)}
        self.late += dropped
        return dropped

    @property
    def complete(self) -> list[Group]:
        """The groups that are scored, in the order of the draw."""
        return [self.groups[number] for number in sorted(self.groups)]

    def assemble(self, metrics: Mapping[str, float], filters: Filters) -> Batch:
        """Return the batch of the complete groups, given the metrics of sampling and scoring. Some groups are dropped,
        loss masks are written."""
        groups = self.complete
        self.uniform.drop(groups)
        batch = Batch(groups, dict(metrics))
        repeated = len(groups) - len({group.prompt.id for group in groups})
        batch.metrics["rollout/prompts_repeated"] = float(repeated)
        batch.metrics |= self.uniform.metrics(groups) | filters.apply(batch.trained)
        versions = set[int]().union(*(np.unique(t.tokens["weight_version"]).tolist() for t in batch.trajectories))
        batch.weight_versions = tuple(sorted(version for version in versions if version >= 0))
        return batch

    def state_dict(self, report_record: Callable[[Any], Any]) -> dict[str, Any]:
        """As a checkpoint keeps it: scored groups whole, of the others the prompt and which draw it is.

        All is JSON but the trajectories.
        """
        records: list[dict[str, Any]] = []
        for number, prompt in enumerate(self.drawn):
            record: dict[str, Any] = {"prompt": prompt.id, "occurrence": self.occurrence(number)}
            if (group := self.groups.get(number)) is not None:
                record["trajectories"] = [copy.copy(t) for t in group.trajectories]  # filters will set masks
                record["report"] = report_record(self.reports[number])
            records.append(record)
        return {"step": self.step, "refills": self.uniform.refills, "draws": dict(self._draws), "groups": records}

    def load_groups(
        self, state: Mapping[str, Any], prompts: Mapping[str, Prompt], report_of: Callable[[Any], Any]
    ) -> None:
        """Take in the groups of a `state_dict`."""
        self._draws = Counter(state["draws"])
        for number, record in enumerate(state["groups"]):
            self.drawn.append(prompts[record["prompt"]])
            self._occurrences[number] = record["occurrence"]
            if "trajectories" in record:
                group = Group(self.drawn[number], list(record["trajectories"]))
                self.add(number, group, report_of(record["report"]))
