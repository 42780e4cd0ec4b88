"""Groups of runs to compare, those with equal configurations but for seed, names and paths; notes and bands of them."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import flattened, short_names, with_defaults
from ctpo_megatron.report.charts import Curve
from ctpo_megatron.report.confidence import student_interval
from ctpo_megatron.report.run_data import RunData

NOT_COMPARED = (
    *("run.name", "run.root", "run.overwrite", "run.resume", "run.deadline", "data.rerender", "extensions.path"),
    *("eval.before_training", "eval.every", "sandbox.url", "cluster.node_address"),
    *("checkpoint", "export", "tracking"),
)
"""Keys, and sections, that say where a run is, what it records and how it is watched, not what it learns."""
OF_A_SEED = ("model.path", "sft.data", "data.train", "data.eval", "rollout.replay")
"""Paths that may belong to a seed: a task, a supervised stage or a recording of its own."""
ABSENT, GIVEN = "absent", "given"
"""What stands for a key that a run does not have, and for a section where another run has none."""
_VALUE, _LABEL = 28, 60
"""Longest value, and usual length of a label, in characters."""
_NAMED = 3
"""Runs that a note names."""
LEAST = 3
"""Seeds from which on a band is an interval: with two, Student's t is 12.7 standard errors wide."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seeds alone.

    label: short and unique among the groups. by_seed: seed -> its runs; more than one are repetitions, and no
    independent seeds. A seed is the text of `run.seed`, with other seeds after a slash where they differ from it.
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
    """Group runs by their configurations, in the order of their first runs.

    Keys of `NOT_COMPARED` and keys that end in `seed` do not count, and in paths the directory of the run does not. A
    path of `OF_A_SEED` does not count where all runs of a seed share it, and each seed has several. A directory that is
    given twice counts once.
    """
    runs = list({run.directory.resolve(): run for run in runs}.values())
    table = _differing([_flat(run) for run in runs])
    columns = [[str(run.setting("run.seed", 0)) for run in runs]]
    columns += [
        found for key, values in table.items() if _is_seed(key) and (found := [*map(str, values)]) != columns[0]
    ]
    seeds = ["/".join(parts) for parts in zip(*columns, strict=True)]
    settings = {
        key.removesuffix(".name"): values
        for key, values in table.items()
        if not _is_seed(key) and not (key in OF_A_SEED and _goes_with(seeds, values))
    }
    members: dict[str, list[int]] = {}
    for index in range(len(runs)):
        members.setdefault(repr([values[index] for values in settings.values()]), []).append(index)
    chosen = [{key: values[indices[0]] for key, values in settings.items()} for indices in members.values()]
    if len(chosen) > 1:
        labels = _labels(chosen)
    else:
        labels = [run_name(runs[0]) if len(runs) == 1 else str(runs[0].setting("objective.preset", "all runs"))]
    return [
        RunGroup(label, _by_seed(runs, seeds, indices), values)
        for label, indices, values in zip(labels, members.values(), chosen, strict=True)
    ]


def _flat(run: RunData) -> dict[str, Any]:
    """Return the configuration that a run is compared by: dotted keys, its own directory as `<run>`."""
    name, root = run.setting("run.name", run.directory.name), run.setting("run.root", "runs")
    own = os.path.join(root, name)
    places = {str(run.directory.absolute()), os.path.join(run.environment.get("directory") or os.getcwd(), own), own}
    pattern = re.compile(rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, sorted(places, key=len, reverse=True)))})(?=/|$)")

    def masked(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [masked(each) for each in value]
        return pattern.sub("<run>", value) if isinstance(value, str) else value

    leaves = flattened(with_defaults(run.config))
    left_out = tuple(f"{name}." for name in NOT_COMPARED)
    return {key: masked(value) for key, value in leaves if value != {} and not f"{key}.".startswith(left_out)}


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _goes_with(seeds: Sequence[str], values: Sequence[Any]) -> bool:
    """Whether each seed has several runs, which all have the same value."""
    by_seed: dict[str, list[str]] = {}
    for seed, value in zip(seeds, values, strict=True):
        by_seed.setdefault(seed, []).append(repr(value))
    return all(len(found) > 1 and len({*found}) == 1 for found in by_seed.values())


def _differing(flat: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key -> the value of each run, of the keys whose values differ.

    Where a run lacks an optional section, its key stands for all that is in it.
    """
    keys = dict.fromkeys(itertools.chain.from_iterable(flat))
    found = {}
    for key in keys:
        parts = key.split(".")
        if any(".".join(parts[:end]) in keys for end in range(1, len(parts))):
            continue
        values = [_value(run, key) for run in flat]
        if len({json.dumps(value, sort_keys=True, default=str) for value in values}) > 1:
            found[key] = values
    return found


def _value(flat: Mapping[str, Any], key: str) -> Any:
    if key in flat:
        return flat[key]
    return GIVEN if any(other.startswith(f"{key}.") for other in flat) else ABSENT


def runs_of(groups: Iterable[RunGroup]) -> list[RunData]:
    return list(itertools.chain.from_iterable(group.runs for group in groups))


def run_name(run: RunData) -> str:
    """Return what messages call a run."""
    return str(run.setting("run.name", run.directory.name))


def _by_seed(runs: Sequence[RunData], seeds: Sequence[str], indices: Iterable[int]) -> dict[str, tuple[RunData, ...]]:
    found: dict[str, tuple[RunData, ...]] = {}
    for index in sorted(indices, key=lambda index: _numbers(seeds[index])):
        found[seeds[index]] = (*found.get(seeds[index], ()), runs[index])
    return found


def _numbers(seed: str) -> list[tuple[float, str]]:
    return [(float(part), "") if part.isdecimal() else (float("inf"), part) for part in seed.split("/")]


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
    """Return a value as YAML writes it, a long one with its end, which tells paths apart."""
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


def notes_of(groups: Sequence[RunGroup], tuned: Collection[str] = ()) -> list[str]:
    """Return what to know, one sentence or two a note. tuned: keys that each group has its own pick of."""
    runs = runs_of(groups)
    return [
        *_named(groups),
        *_repeated(groups),
        *_tuned(groups, tuned),
        *_confounded(groups, tuned),
        *_few_seeds(groups),
        *_unfinished(runs),
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
                "A difference cannot be attributed to one of them."
            )


def _named(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Which run a group of one is, where its label does not say it."""
    names = [f"{group.label} is {run_name(group.runs[0])}" for group in groups if len(group.runs) == 1]
    if any(group.label != run_name(group.runs[0]) for group in groups if len(group.runs) == 1):
        yield f"Runs: {'; '.join(names)}."


def _few_seeds(groups: Sequence[RunGroup]) -> Iterator[str]:
    single = [group.label for group in groups if len(group.seeds) == 1]
    if single:
        yield f"Only one seed: {', '.join(single)}. The result may not hold for others."


def _unfinished(runs: Sequence[RunData]) -> Iterator[str]:
    for run in runs:
        if run.last_step < (steps := run.setting("run.steps", run.last_step)):
            yield f"{run_name(run)} is at step {run.last_step} of {steps}."


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


def mean_and_band(group: RunGroup, metric: str) -> Curve | None:
    """Return the mean of a metric over seeds, at the steps that all of those which have it share; None: none has it.

    The band: from `LEAST` seeds on the 95 % interval of the mean (Student's t); of two seeds both values; None for one
    seed. Repeated runs of a seed count once, by their mean.
    """
    found = [curve for runs in group.by_seed.values() if (curve := _mean_of(runs, metric))]
    if not found:
        return None
    steps = sorted(set.intersection(*map(set, found)))
    columns = [[curve[step] for curve in found] for step in steps]
    ends = _ends(columns, len(found))
    low, high = (None if ends is None else [pair[side] for pair in ends] for side in (0, 1))
    return Curve(group.label, steps, [sum(column) / len(column) for column in columns], low=low, high=high)


def _mean_of(runs: Sequence[RunData], metric: str) -> dict[float, float]:
    """Step -> mean over the runs that have a value there."""
    values: dict[float, list[float]] = {}
    for series in filter(None, (run.series(metric) for run in runs)):
        for step, value in zip(series.steps, series.values, strict=True):
            values.setdefault(step, []).append(value)
    return {step: sum(found) / len(found) for step, found in values.items()}


def _ends(columns: Sequence[Sequence[float]], seeds: int) -> list[tuple[float, float]] | None:
    if seeds == 1:
        return None
    if seeds < LEAST:
        return [(min(column), max(column)) for column in columns]
    return [student_interval(column) for column in columns]
