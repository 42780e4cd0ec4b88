"""A batch from the draw of its prompts until the trainer takes it: which groups it keeps, how a checkpoint has it."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Batch, Group, Prompt
from ctpo_megatron.rewards import Scorer, ScoreReport
from ctpo_megatron.rollouts.filters import Filters
from ctpo_megatron.rollouts.metrics import rollout_metrics


@dataclass(eq=False, slots=True)
class Draw:
    """A prompt of a batch. occurrence: how often its step had drawn it before. group, report: once it is scored."""

    prompt: Prompt
    occurrence: int | None = None
    group: Group | None = None
    report: ScoreReport | None = None


class OpenBatch:
    """The groups of one step from the draw of their prompts until the trainer takes them.

    mini_batch_prompts: groups of one optimizer step. by_turn: whether the rewards of turns are trained on. draws: in
    the order of the data; scored: those with a group, in the order of scoring. sampling: groups that are not sampled
    yet; changed: set when that has changed. late: groups that were not waited for. refills: rounds for uniform groups.
    seconds: sampling took. batch: what the trainer gets; None: sampling has not begun, as after a resume.
    """

    def __init__(self, step: int, config: RolloutConfig, mini_batch_prompts: int, *, by_turn: bool = False) -> None:
        self.step, self._config, self._mini, self._by_turn = step, config, mini_batch_prompts, by_turn
        self.draws, self.scored = list[Draw](), list[Draw]()
        self.sampling = self.late = self.refills = 0
        self.changed = asyncio.Event()
        self.batch: asyncio.Task[Batch] | None = None
        self._counts: Counter[str] = Counter()
        self._began, self.seconds = time.monotonic(), 0.0

    def occurrence(self, draw: Draw) -> int:
        """The occurrence of a draw, fixed when it is first asked for. A discarded group keeps the one that it had."""
        if draw.occurrence is None:
            draw.occurrence = self._counts[draw.prompt.id]
            self._counts[draw.prompt.id] += 1
        return draw.occurrence

    @property
    def done(self) -> bool:
        """Whether the batch is complete, or has failed."""
        return self.batch is not None and self.batch.done()

    def note(self, change: int) -> None:
        """More groups, or fewer, are being sampled."""
        self.sampling += change
        if change < 0:
            self.seconds = time.monotonic() - self._began
        self.changed.set()

    async def until(self, *, sampling: bool) -> None:
        """Return when groups have begun to be sampled, or all of them have ended, or the batch is done."""
        while bool(self.sampling) is not sampling and not self.done:
            self.changed.clear()
            await self.changed.wait()

    def add(self, draw: Draw, group: Group, report: ScoreReport) -> None:
        """The group of a draw is scored."""
        draw.group, draw.report = group, report
        self.scored.append(draw)

    def keep_first(self, count: int) -> int:
        """Keep the groups that were scored first, in the order of the draw; returns how many draws are dropped."""
        kept, drawn = set(self.scored[:count]), len(self.draws)
        self.draws = [draw for draw in self.draws if draw in kept]
        self.scored = list(self.draws)
        self.late += drawn - len(kept)
        return drawn - len(kept)

    @property
    def complete(self) -> list[Group]:
        """The groups that are scored, in the order of the draw."""
        return [draw.group for draw in self.draws if draw.group is not None]

    def missing(self, groups: Sequence[Group]) -> int:
        """How many prompts to draw for another round of refills, given all scored groups; 0: the batch is complete."""
        if self._config.uniform_groups != "refill" or self.refills == self._config.max_refills:
            return 0
        missing = self._config.prompts_per_step - sum(group.is_mixed(by_turn=self._by_turn) for group in groups)
        self.refills += missing > 0
        return missing

    def assemble(self, scorer: Scorer, filters: Filters) -> Batch:
        """Return the batch of the complete groups. Some groups are dropped, loss masks are written."""
        groups = self.complete
        reports = [draw.report for draw in self.draws if draw.report is not None]
        batch = Batch(groups, rollout_metrics(groups) | scorer.metrics(groups, reports))
        batch.metrics["rollout/prompts_repeated"] = float(len(groups) - len({group.prompt.id for group in groups}))
        if self._config.uniform_groups != "keep":
            batch.metrics |= self._drop_uniform(groups)
        batch.metrics |= filters.apply(batch.trained)
        versions = set[int]().union(*(np.unique(t.tokens["weight_version"]).tolist() for t in batch.trajectories))
        batch.weight_versions = tuple(sorted(version for version in versions if version >= 0))
        return batch

    def _drop_uniform(self, groups: Sequence[Group]) -> dict[str, float]:
        """Mark groups whose rewards are all equal as dropped, but the last ones that fill the last optimizer step; at
        least one is made. Groups without verdicts to compare are the first to leave."""
        uniform = [group for group in groups if not group.is_mixed(by_turn=self._by_turn)]
        steps = max(1, math.ceil((len(groups) - len(uniform)) / self._mini))
        for group in sorted(uniform, key=lambda group: not group.unjudged)[: len(groups) - steps * self._mini]:
            group.dropped = True
        dropped = float(sum(group.dropped for group in groups))
        metrics = {"rollout/groups_uniform": len(uniform) / len(groups), "rollout/groups_dropped": dropped}
        return metrics | ({"rollout/refills": float(self.refills)} if self._config.uniform_groups == "refill" else {})

    def state_dict(self) -> dict[str, Any]:
        """As a checkpoint keeps it: scored groups whole, of others the prompt. All is JSON but the trajectories."""
        records: list[dict[str, Any]] = []
        for draw in self.draws:
            records.append({"prompt": draw.prompt.id, "occurrence": self.occurrence(draw)})
            if draw.group is not None and draw.report is not None:
                kept = [copy.copy(trajectory) for trajectory in draw.group.trajectories]  # filters will set masks
                records[-1] |= {"trajectories": kept, "report": asdict(draw.report)}
        return {"step": self.step, "refills": self.refills, "draws": dict(self._counts), "groups": records}

    def load_state_dict(self, state: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> None:
        """Continue from a `state_dict` of this step. prompts: those that it names, by id."""
        self._counts, self.refills = Counter(state["draws"]), state["refills"]
        for record in state["groups"]:
            draw = Draw(prompts[record["prompt"]], record["occurrence"])
            self.draws.append(draw)
            if "trajectories" in record:
                self.add(draw, Group(draw.prompt, list(record["trajectories"])), ScoreReport(**record["report"]))
