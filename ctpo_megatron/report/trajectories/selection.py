"""Chooses trajectories of a run for a page: a sample for the report, or what passes filters."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES
from ctpo_megatron.report.trajectories.ratio import RatioQuantity
from ctpo_megatron.report.trajectories.view import Budget, GroupView, Source, View, view_of
from ctpo_megatron.tracking import Head, read_heads, read_texts, records_at, trajectory_files

log = logging.getLogger(__name__)
FOLDERS: dict[Source, str] = {"training": TRAJECTORIES, "evaluation": EVALUATION}
GROUPS_PER_STEP = 8
EVALUATION_EXAMPLES = 8
REPORT_TOKENS, FILTERED_TOKENS = 8_000, 40_000
"""Tokens that a page shows one by one; the rest is plain text, so that the page stays small."""
CHARACTERS = 6_000
"""Of a piece of text."""


@dataclass(frozen=True)
class Selection:
    """groups: to be shown, by dump. quantity: what their ratios are. left_out: phrases that name the others.

    count: trajectories that pass filters, of `searched` in all dumps of the chosen steps.
    """

    groups: list[GroupView]
    quantity: RatioQuantity
    left_out: list[str]
    count: int = 0
    searched: int = 0

    @property
    def views(self) -> list[View]:
        """All trajectories that are shown."""
        return [view for group in self.groups for view in group.views]


def sample_of_run(run_dir: Path, objective: Any = None) -> Selection:
    """Choose trajectories worth reading: best and worst of groups of the first and last step, and evaluation examples.

    Of a dump, these alone are read. Each dump has the same share of the tokens that are shown individually.
    objective: that section of the run's configuration.
    """
    files = {source: trajectory_files(run_dir, folder) for source, folder in FOLDERS.items()}
    dumps = [(source, step) for source, found in files.items() for step in sorted({*[*found][:1], *[*found][-1:]})]
    quantity, groups, left_out = RatioQuantity.of(objective), list[GroupView](), list[str]()
    for source, step in dumps:
        name = f"step {step}" if source == "training" else f"the evaluation after step {step}"
        budget = Budget(REPORT_TOKENS // len(dumps), CHARACTERS)
        try:
            dump = _Dump(source, step, files[source][step])
            chosen = _best_and_worst(dump.heads) if source == "training" else _examples(dump.heads)
            groups += dump.views(chosen, quantity, budget)
        except DamagedFileError as error:
            log.warning("%s: the report goes without it", error)
            left_out.append(f"{name}, whose file is damaged")
            continue
        if len(chosen) < len(dump.heads):
            left_out.append(f"{len(dump.heads) - len(chosen):,} of {len(dump.heads):,} of {name}")
    others = sum(map(len, files.values())) - len(dumps)
    return Selection(groups, quantity, [*([f"{others:,} other dumps"] if others else []), *left_out])


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
            and (self.tool is None or self._accept_tools(head.tools))
        )

    def _accept_tools(self, statuses: Sequence[str]) -> bool:
        if self.tool == "none":
            return not statuses
        if self.tool == "failed":
            return bool(statuses) and "success" not in statuses
        return self.tool in statuses

    def passing(self, dump: _Dump) -> list[Head]:
        """Return the trajectories of a dump that pass, in its order. Raises DamagedFileError."""
        found = [head for head in dump.heads if self.accept(head)]
        if self.text is None or not found:
            return found
        text = self.text.casefold()
        with_text = {
            place for place, texts in enumerate(read_texts(dump.path)) if any(text in part.casefold() for part in texts)
        }
        return [head for head in found if head.place in with_text]


def matching(run_dir: Path, filters: TrajectoryFilters, most: int, objective: object = None) -> Selection:
    """Return the trajectories that pass, newest step first; at most `most` of them are prepared for the page.

    Dumps that cannot be read are named in `Selection.left_out`. objective: that section of the run's configuration.
    """
    quantity, budget = RatioQuantity.of(objective), Budget(FILTERED_TOKENS, CHARACTERS)
    groups, left_out = list[GroupView](), list[str]()
    shown = count = searched = 0
    for step, path in sorted(trajectory_files(run_dir, FOLDERS[filters.source]).items(), reverse=True):
        if filters.steps is not None and not any(step in steps for steps in filters.steps):
            continue
        try:
            dump = _Dump(filters.source, step, path)
            passing = filters.passing(dump)
            chosen = passing[: most - shown]
            groups += dump.views(chosen, quantity, budget)
        except DamagedFileError as error:
            log.warning("%s: the page goes without it", error)
            left_out.append(f"{path.name}, which cannot be read")
            continue
        shown, count, searched = shown + len(chosen), count + len(passing), searched + len(dump.heads)
    if shown < count:
        left_out.append(f"{count - shown:,} of the {count:,} trajectories that match")
    return Selection(groups, quantity, left_out, count, searched)


class _Dump:
    """A dump of trajectories. heads: what each is chosen by. Raises DamagedFileError."""

    def __init__(self, source: Source, step: int, path: Path) -> None:
        self.path, self.heads = path, read_heads(path)
        self._source, self._step = source, step

    def views(self, chosen: Sequence[Head], quantity: RatioQuantity, budget: Budget) -> list[GroupView]:
        """Read the chosen trajectories, by prompt in the order of the choice. Raises DamagedFileError."""
        by_prompt: dict[str, list[View]] = {}
        records = records_at(self.path, [head.place for head in chosen])
        for head, record in zip(chosen, records, strict=True):
            try:
                view = view_of(self._source, self._step, head.place, record, quantity, budget)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                what = f"trajectory {head.place + 1}: {type(error).__name__}: {error}"
                raise DamagedFileError(f"{self.path} is damaged ({what})") from error
            by_prompt.setdefault(head.prompt_id, []).append(view)
        return [
            GroupView(views, [head for head in self.heads if head.prompt_id == prompt_id])
            for prompt_id, views in by_prompt.items()
        ]


def _reward(head: Head) -> float:
    """Return what trajectories are ranked by: without a verdict last."""
    return -math.inf if head.reward is None else head.reward


def _best_and_worst(heads: Sequence[Head]) -> list[Head]:
    """Return the best and the worst trajectory of some groups.

    Groups whose rewards differ come first, and among them groups with recorded ratios.
    """
    groups: dict[str, list[Head]] = {}
    for head in heads:
        groups.setdefault(head.prompt_id, []).append(head)
    judged = [[head for head in group if head.reward is not None] or group for group in groups.values()]
    pairs = [(max(group, key=_reward), min(group, key=_reward)) for group in judged]
    pairs.sort(key=lambda pair: (_reward(pair[0]) == _reward(pair[1]), not pair[0].traced))
    chosen = []
    for best, worst in pairs[:GROUPS_PER_STEP]:
        chosen += [best] if _reward(best) == _reward(worst) else [best, worst]
    return chosen


def _examples(heads: Sequence[Head]) -> list[Head]:
    """Return half wrong, half right ones where both exist."""
    ranked = sorted(heads, key=_reward)
    half = EVALUATION_EXAMPLES // 2
    return ranked if len(ranked) <= EVALUATION_EXAMPLES else ranked[:half] + ranked[-half:]


def _as_option(steps: range) -> str:
    return str(steps.start) if len(steps) == 1 else f"{steps.start}-{steps.stop - 1}"
