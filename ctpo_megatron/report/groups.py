"""Groups of runs to compare: those that differ in their seeds alone. What a reader has to know of them, in notes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import short_names
from ctpo_megatron.report.differences import ABSENT, Differences, differences
from ctpo_megatron.report.run_data import RunData

_VALUE, _LABEL = 28, 60
"""Longest value, and usual length of a label, in characters."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seeds alone.

    label: short and unique among the groups. by_seed: seed -> its runs; more than one are repetitions, and no
    independent seeds. A seed is the text of `run.seed`, with other seeds after a slash where they do not follow it.
    settings: the keys that differ between groups, with the values of this one.
    """

    label: str
    by_seed: Mapping[str, tuple[RunData, ...]]
    settings: Mapping[str, Any]

    @property
    def runs(self) -> list[RunData]:
        return list(itertools.chain.from_iterable(self.by_seed.values()))

    @property
    def seeds(self) -> list[str]:
        """Each once, in ascending order."""
        return list(self.by_seed)

    @property
    def repeated(self) -> dict[str, list[str]]:
        """Seed -> names of its runs, where there are several: they count as one."""
        return {seed: [*map(run_name, runs)] for seed, runs in self.by_seed.items() if len(runs) > 1}


def groups_of(runs: Sequence[RunData]) -> list[RunGroup]:
    """Group runs by what differs in their configurations (`differences`), in the order of their first runs.

    A directory that is given twice counts once.
    """
    runs = list({run.directory.resolve(): run for run in runs}.values())
    found = differences(runs)
    seeds = _seeds(runs, found)
    members: dict[str, list[int]] = {}
    for place in range(len(runs)):
        members.setdefault(repr([values[place] for values in found.settings.values()]), []).append(place)
    settings = [{key: values[places[0]] for key, values in found.settings.items()} for places in members.values()]
    labels = _labels(settings) if len(settings) > 1 else [_label_of_all(runs)] * len(settings)
    return [
        RunGroup(label, _by_seed(runs, seeds, places), chosen)
        for label, places, chosen in zip(labels, members.values(), settings, strict=True)
    ]


def runs_of(groups: Iterable[RunGroup]) -> list[RunData]:
    return list(itertools.chain.from_iterable(group.runs for group in groups))


def run_name(run: RunData) -> str:
    """What messages call a run."""
    return str(run.setting("run.name", run.directory.name))


def _by_seed(runs: Sequence[RunData], seeds: Sequence[str], places: Iterable[int]) -> dict[str, tuple[RunData, ...]]:
    found: dict[str, tuple[RunData, ...]] = {}
    for place in sorted(places, key=lambda place: _numbers(seeds[place])):
        found[seeds[place]] = (*found.get(seeds[place], ()), runs[place])
    return found


def _numbers(seed: str) -> list[tuple[float, str]]:
    return [(float(part), "") if part.isdecimal() else (float("inf"), part) for part in seed.split("/")]


def _seeds(runs: Sequence[RunData], found: Differences) -> list[str]:
    """Of each run: `run.seed`, and the other seeds where equal ones of `run.seed` have different ones."""
    columns = [[str(run.setting("run.seed", 0)) for run in runs]]
    for values in found.seeds.values():
        known = set(zip(*columns, strict=True))
        if len({*zip(*columns, map(str, values), strict=True)}) > len(known):
            columns.append([*map(str, values)])
    return ["/".join(parts) for parts in zip(*columns, strict=True)]


def _label_of_all(runs: Sequence[RunData]) -> str:
    """Of the only group."""
    return run_name(runs[0]) if len(runs) == 1 else str(runs[0].setting("objective.preset", "all runs"))


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short, unique names for groups: the values of as few keys as tell them apart, the objective's first."""
    keys = sorted(settings[0], key=lambda key: not key.startswith("objective."))
    chosen: list[str] = []
    for key in keys:
        if len(_distinct(settings, [*chosen, key])) > len(_distinct(settings, chosen)):
            chosen.append(key)
    names = short_names(chosen, settings[0])
    for most in (_VALUE, _LABEL):
        labels = [", ".join(_setting(names[key], each[key], most) for key in chosen) for each in settings]
        if len(chosen) == 1:
            plain = [shown(each[chosen[0]], most) for each in settings]
            labels = plain if all(isinstance(each[chosen[0]], str) for each in settings) else labels
        if len(set(labels)) == len(labels) and max(map(len, labels)) <= 2 * _LABEL:
            return labels
    return [f"{number}: {_cut(label, _LABEL)}" for number, label in enumerate(labels, start=1)]


def _distinct(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> set[str]:
    return {repr([each[key] for key in keys]) for each in settings}


def _setting(name: str, value: Any, most: int) -> str:
    return f"no {name}" if value == ABSENT else f"{name}={shown(value, most)}"


def shown(value: Any, most: int = _VALUE) -> str:
    """A value as YAML writes it, a long one with its end, which tells paths apart."""
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, float):
        text = f"{value:g}"
    elif isinstance(value, list):
        text = "[" + ", ".join(shown(each, most) for each in value) + "]"
    else:
        text = str(value)
    return _cut(text, most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[len(text) - most + 1 :]}"


_NAMED = 3
"""Runs that a note names."""


def notes_of(groups: Sequence[RunGroup], tuned: Collection[str] = ()) -> list[str]:
    """Return what to know, one sentence or two a note. tuned: keys that each group has its own pick of."""
    runs = runs_of(groups)
    found = differences(runs)
    return [
        *_named(groups),
        *_repeated(groups),
        *_tuned(groups, tuned),
        *_confounded(groups, tuned),
        *_few_seeds(groups),
        *_unfinished(runs),
        *_of_keys(runs, found),
        *_environments(runs),
    ]


def _repeated(groups: Sequence[RunGroup]) -> Iterator[str]:
    for group in groups:
        for seed, names in group.repeated.items():
            yield f"{group.label}: {', '.join(names)} repeat seed {seed}. They count as one seed, by their mean."


def _tuned(groups: Sequence[RunGroup], tuned: Collection[str]) -> Iterator[str]:
    for key in groups[0].settings:
        if key in tuned:
            values = ", ".join(f"{group.label} {shown(group.settings[key])}" for group in groups)
            yield f"{key} was picked for each on other seeds: {values}."


def _confounded(groups: Sequence[RunGroup], tuned: Collection[str]) -> Iterator[str]:
    """Groups that differ from the first in several keys, without those that are tuned."""
    for group in groups[1:]:
        unequal = [key for key, value in group.settings.items() if value != groups[0].settings[key]]
        keys = [key for key in unequal if key not in tuned]
        if len(keys) > 1:
            yield (
                f"{group.label} differs from {groups[0].label} in {len(keys)} keys: {', '.join(keys)}. "
                "What a difference is due to cannot be told."
            )


def _named(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Which run a group of one is, where its label does not say it."""
    names = [f"{group.label} is {run_name(group.runs[0])}" for group in groups if len(group.runs) == 1]
    if any(group.label != run_name(group.runs[0]) for group in groups if len(group.runs) == 1):
        yield f"Runs: {'; '.join(names)}."


def _few_seeds(groups: Sequence[RunGroup]) -> Iterator[str]:
    single = [group.label for group in groups if len(group.seeds) == 1]
    if single:
        yield f"One seed: {', '.join(single)}. Nothing is known of other seeds."


def _unfinished(runs: Sequence[RunData]) -> Iterator[str]:
    for run in runs:
        if run.last_step < (steps := run.setting("run.steps", run.last_step)):
            yield f"{run_name(run)} is at step {run.last_step} of {steps}."


def _of_keys(runs: Sequence[RunData], found: Differences) -> Iterator[str]:
    if found.following:
        yield f"Not compared, since the values follow run.seed: {', '.join(found.following)}."
    if found.addresses:
        yield f"Not compared, since the values are addresses: {', '.join(found.addresses)}."
    for key, values in found.unknown.items():
        without = [run for run, value in zip(runs, values, strict=True) if value == ABSENT]
        yield f"Not compared: {key}, which this version does not know and {_names(without)} lacks."
    for key, values in found.seeds.items():
        if key != "run.seed" and [*map(str, values)] != [str(run.setting("run.seed", 0)) for run in runs]:
            yield f"{key} is not run.seed everywhere: {_by_value(runs, values)}."


def _environments(runs: Sequence[RunData]) -> Iterator[str]:
    facts = [_facts(run) for run in runs]
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name) for each in facts]
        if len(set(map(repr, values))) > 1:
            yield f"Other {name}: {_by_value(runs, values)}."
    changed = [run for run in runs if str(run.environment.get("commit")).endswith("+changes")]
    if changed and len(runs) > 1:
        yield f"Code with changes that no commit has: {_names(changed)}. Whether it was the same is unknown."


def _facts(run: RunData) -> dict[str, Any]:
    """What may make a run with the same configuration another one."""
    known: dict[str, Any] = run.environment
    recorded = {name: known.get(name) for name in ("version", "python", "devices", "ranks")}
    commit = str(known["commit"]).replace("+changes", " with changes") if known.get("commit") else None
    packages: dict[str, Any] = known.get("packages", {})
    return {"commit": commit and commit[:8] + commit[40:], **recorded, **packages, **_digests(run)}


def _digests(run: RunData) -> dict[str, str]:
    """Of the files of users' parts: the first characters of the SHA-256."""
    folder = RunPaths(run.directory).extensions
    copies = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()[:8] for path in copies}


def _by_value(runs: Sequence[RunData], values: Sequence[Any]) -> str:
    """`x (a, b), y (c)`: each value with its runs."""
    by_value: dict[str, list[RunData]] = {}
    for run, value in zip(runs, values, strict=True):
        by_value.setdefault("unknown" if value is None else shown(value, 60), []).append(run)
    return ", ".join(f"{value} ({_names(members)})" for value, members in by_value.items())


def _names(runs: Sequence[RunData]) -> str:
    names = [*map(run_name, runs)]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
