"""Groups of runs to compare: runs with the same configuration and other seeds are one group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        return [run for runs in self.by_seed.values() for run in runs]

    @property
    def seeds(self) -> list[str]:
        """Each once, in ascending order."""
        return list(self.by_seed)

    @property
    def repeated(self) -> dict[str, list[str]]:
        """Seed -> names of its runs, where there are several: they count as one."""
        return {seed: [*map(run_name, runs)] for seed, runs in self.by_seed.items() if len(runs) > 1}


def groups_of(runs: Sequence[RunData], ignored: Collection[str] = ()) -> list[RunGroup]:
    """Group runs by what differs in their configurations (`differences`), in the order of their first runs.

    A directory that is given twice counts once. ignored: keys or sections that are not to separate groups.
    """
    runs = list({run.directory.resolve(): run for run in runs}.values())
    found = differences(runs, ignored)
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
    names = _short_names(chosen, settings[0])
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


def _short_names(keys: Sequence[str], among: Iterable[str]) -> dict[str, str]:
    """Each key by as few of its last parts as no other key ends in."""
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        unique = (end for end in ends if not any(f".{other}".endswith(f".{end}") for other in among if other != key))
        names[key] = next(unique, key)
    return names


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
