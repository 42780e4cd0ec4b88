"""TrajectoryFilters that choose trajectories of a run for a page of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.report.trajectories.addresses import FOLDERS, Addressed, Source, addresses
from ctpo_megatron.report.trajectories.ratio import RatioQuantity
from ctpo_megatron.report.trajectories.sample import Selection, groups_of
from ctpo_megatron.report.trajectories.view import Budget, GroupView, view_of
from ctpo_megatron.tracking import Head, read_heads, read_texts, records_at, trajectory_files

log = logging.getLogger(__name__)
TOKENS, CHARACTERS = 40_000, 6_000
"""Of a page: tokens shown one by one, and characters of a piece of text."""


@dataclass(frozen=True)
class TrajectoryFilters:
    """What a trajectory has to be; None filters nothing.

    steps: training steps, or steps after which an evaluation ran. text: in prompt, turns, observations or tool output,
    whatever the case of its letters. prompt: a whole prompt id. reward: the whole reward, or `none` without a verdict.
    tool: `none` (no call), `failed` (calls, none of which succeeded), or the status of any call. finish: the reason why
    it ended. source: which dumps are read.
    """

    steps: tuple[range, ...] | None = None
    text: str | None = None
    prompt: str | None = None
    reward: float | Literal["none"] | None = None
    tool: str | None = None
    finish: str | None = None
    source: Source = "training"

    def __str__(self) -> str:
        """Return the filters as options of `ctpo report`."""
        given = {name: getattr(self, name) for name in ("text", "prompt", "reward", "tool", "finish")}
        shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in given.items()}
        options = [f"--{name} {value}" for name, value in shown.items() if value is not None]
        if self.steps is not None:
            options.insert(0, f"--steps {','.join(map(_as_option, self.steps))}")
        return " ".join([*options, *(["--evaluations"] if self.source == "evaluation" else [])])

    def accept(self, head: Head) -> bool:
        """Return whether a trajectory passes all filters but `steps`, `text` and `source`."""
        return (
            self.prompt in (None, head.prompt_id)
            and self.finish in (None, head.finish_reason)
            and (self.reward is None or head.reward == (None if self.reward == "none" else self.reward))
            and (self.tool is None or self._accept_tools(head.tools.split()))
        )

    def _accept_tools(self, statuses: list[str]) -> bool:
        if self.tool == "none":
            return not statuses
        if self.tool == "failed":
            return bool(statuses) and "success" not in statuses
        return self.tool in statuses

    def matches(self, step: int, path: Path) -> list[Addressed]:
        """Return the trajectories of a dump that pass, in its order. Raises DamagedFileError."""
        heads = read_heads(path)
        passing = [
            (address, head)
            for address, head in zip(addresses(self.source, step, heads), heads, strict=True)
            if self.accept(head)
        ]
        if self.text is None or not passing:
            return passing
        text = self.text.casefold()
        with_text = {
            place for place, texts in enumerate(read_texts(path)) if any(text in part.casefold() for part in texts)
        }
        return [pair for pair in passing if pair[1].place in with_text]


@dataclass(frozen=True)
class Matches:
    """A selection for a page. count: trajectories that match, of `searched` in all dumps of the chosen steps."""

    selection: Selection
    count: int
    searched: int


def matching(run_dir: Path, filters: TrajectoryFilters, most: int, objective: object = None) -> Matches:
    """Return the trajectories that pass, newest step first; at most `most` of them are prepared for the page.

    Dumps that cannot be read are named in `Selection.left_out`. objective: that section of the run's configuration.
    """
    quantity, budget = RatioQuantity.of(objective), Budget(TOKENS, CHARACTERS)
    groups, left_out = list[GroupView](), list[str]()
    shown = count = searched = 0
    for step, path in _newest_first(run_dir, filters):
        try:
            passing = filters.matches(step, path)
            heads = read_heads(path)
            chosen = passing[: most - shown]
            if chosen:
                named = zip(addresses(filters.source, step, heads), heads, strict=True)
                groups += _views(path, chosen, [*named], quantity, budget)
        except DamagedFileError as error:
            log.warning("%s: the page goes without it", error)
            left_out.append(f"{path.name}, which cannot be read")
            continue
        shown, count, searched = shown + len(chosen), count + len(passing), searched + len(heads)
    if shown < count:
        left_out.append(f"{count - shown:,} of the {count:,} trajectories that match")
    return Matches(Selection(groups, quantity, left_out), count, searched)


def _newest_first(run_dir: Path, filters: TrajectoryFilters) -> Iterator[tuple[int, Path]]:
    for step, path in sorted(trajectory_files(run_dir, FOLDERS[filters.source]).items(), reverse=True):
        if filters.steps is None or any(step in steps for steps in filters.steps):
            yield step, path


def _views(
    path: Path, chosen: list[Addressed], named: list[Addressed], quantity: RatioQuantity, budget: Budget
) -> Iterator[GroupView]:
    for some, of_prompt in groups_of(chosen, named):
        records = records_at(path, [head.place for _, head in some])
        views = [view_of(address, record, quantity, budget) for (address, _), record in zip(some, records, strict=True)]
        yield GroupView(views, of_prompt)


def _as_option(steps: range) -> str:
    return str(steps.start) if len(steps) == 1 else f"{steps.start}-{steps.stop - 1}"
