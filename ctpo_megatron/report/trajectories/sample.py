"""Chooses the trajectories that the report holds, and says which others there are."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.report.trajectories.addresses import FOLDERS, Addressed, Source, addresses
from ctpo_megatron.report.trajectories.ratio import RatioQuantity
from ctpo_megatron.report.trajectories.view import Budget, GroupView, View, view_of
from ctpo_megatron.tracking import read_heads, records_at, trajectory_files

log = logging.getLogger(__name__)

GROUPS_PER_STEP = 8
EVALUATION_EXAMPLES = 8
TOKEN_BUDGET = 8_000
"""Tokens shown individually on the whole page; the rest is plain text, so that the page stays small."""
TEXT_LIMIT = 6_000
"""Characters of one piece of text."""


@dataclass(frozen=True)
class Selection:
    """groups: to be shown, by dump. quantity: what their ratios are. left_out: phrases that name the others."""

    groups: list[GroupView]
    quantity: RatioQuantity
    left_out: list[str]

    @property
    def views(self) -> list[View]:
        """All trajectories that are shown."""
        return [view for group in self.groups for view in group.views]


def sample_of_run(run_dir: Path, objective: Any = None) -> Selection:
    """Trajectories worth reading: best and worst of groups of the first and last step, and evaluation examples.

    Of a dump, these alone are read. Each dump has the same share of the tokens that are shown individually.
    objective: that section of the run's configuration.
    """
    files = {source: trajectory_files(run_dir, folder) for source, folder in FOLDERS.items()}
    dumps = [(source, step) for source, found in files.items() for step in _first_and_last(found)]
    quantity, groups = RatioQuantity.of(objective), list[GroupView]()
    left_out = [*_other_dumps(files)]
    for source, step in dumps:
        budget = Budget(TOKEN_BUDGET // len(dumps), TEXT_LIMIT)
        try:
            found, count = _of_dump(source, step, files[source][step], quantity, budget)
        except DamagedFileError as error:
            log.warning("%s: the report goes without it", error)
            left_out.append(f"{_dump_name(source, step)}, whose file is damaged")
            continue
        groups += found
        shown = sum(len(group.views) for group in found)
        if shown < count:
            left_out.append(f"{count - shown:,} of {count:,} of {_dump_name(source, step)}")
    return Selection(groups, quantity, left_out)


def groups_of(
    chosen: Sequence[Addressed], all_heads: Iterable[Addressed]
) -> Iterator[tuple[list[Addressed], list[Addressed]]]:
    """The chosen ones of each prompt, and all of that prompt, in the order in which prompts were chosen."""
    by_prompt: dict[str, tuple[list[Addressed], list[Addressed]]] = {}
    for address, head in chosen:
        by_prompt.setdefault(head.prompt_id, ([], []))[0].append((address, head))
    for address, head in all_heads:
        if head.prompt_id in by_prompt:
            by_prompt[head.prompt_id][1].append((address, head))
    yield from by_prompt.values()


def _of_dump(
    source: Source, step: int, path: Path, quantity: RatioQuantity, budget: Budget
) -> tuple[list[GroupView], int]:
    """What is shown of a dump, and how many it has."""
    heads = [*read_heads(path)]
    named = list(zip(addresses(source, step, heads), heads, strict=True))
    chosen = _best_and_worst(named) if source == "training" else _examples(named)
    groups = [*groups_of(chosen, named)]
    shown = [head.place for some, _ in groups for _, head in some]
    records = dict(zip(shown, records_at(path, shown), strict=True))
    views = [
        GroupView([view_of(address, records[head.place], quantity, budget) for address, head in some], heads_of_group)
        for some, heads_of_group in groups
    ]
    return views, len(heads)


def _first_and_last(steps: Iterable[int]) -> list[int]:
    found = [*steps]
    return sorted({min(found), max(found)}) if found else []


def _other_dumps(files: dict[Source, dict[int, Path]]) -> Iterator[str]:
    for source, found in files.items():
        others = sorted(set(found) - set(_first_and_last(found)))
        if others:
            steps = "step" if len(others) == 1 else "steps"
            name = {"training": steps, "evaluation": f"evaluations after {steps}"}[source]
            yield f"all of {name} {_ranges(others)}"


def _dump_name(source: Source, step: int) -> str:
    return f"step {step}" if source == "training" else f"the evaluation after step {step}"


def _ranges(numbers: Sequence[int]) -> str:
    """Such as `2–7, 9`; of very many only the ends."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    if len(runs) > 12:
        return f"{numbers[0]} to {numbers[-1]} ({len(numbers)} dumps)"
    return ", ".join("–".join(map(str, run)) for run in runs)


def _reward(chosen: Addressed) -> float:
    """By which trajectories are ranked: without a verdict last."""
    return -math.inf if chosen[1].reward is None else chosen[1].reward


def _best_and_worst(named: Sequence[Addressed]) -> list[Addressed]:
    """Best and worst trajectory of some groups; groups whose rewards differ come first, and among them groups with
    recorded ratios."""
    groups: dict[str, list[Addressed]] = {}
    for address, head in named:
        groups.setdefault(head.prompt_id, []).append((address, head))
    judged = [[each for each in group if each[1].reward is not None] or group for group in groups.values()]
    pairs = [(max(group, key=_reward), min(group, key=_reward)) for group in judged]
    pairs.sort(key=lambda pair: (_reward(pair[0]) == _reward(pair[1]), not pair[0][1].traced))
    chosen = []
    for best, worst in pairs[:GROUPS_PER_STEP]:
        chosen += [best] if _reward(best) == _reward(worst) else [best, worst]
    return chosen


def _examples(named: Sequence[Addressed]) -> list[Addressed]:
    """Half wrong, half right where both exist."""
    ranked = sorted(named, key=_reward)
    half = EVALUATION_EXAMPLES // 2
    return ranked if len(ranked) <= EVALUATION_EXAMPLES else ranked[:half] + ranked[-half:]
