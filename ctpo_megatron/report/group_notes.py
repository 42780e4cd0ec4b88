"""What a reader of a comparison has to know: repeated seeds, several differences at once, other code or machines."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ctpo_megatron.base.files import read_note
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report.differences import ABSENT, ORIGIN, Differences, differences
from ctpo_megatron.report.groups import RunGroup, run_name, shown
from ctpo_megatron.report.run_data import RunData

_NAMED = 3
"""Runs that a note names."""


def notes_of(groups: Sequence[RunGroup], ignored: Collection[str] = ()) -> list[str]:
    """One sentence or two a note; empty where there is nothing to say. ignored: as for `groups_of`."""
    runs = [run for group in groups for run in group.runs]
    found = differences(runs, ignored)
    return [
        *_repeated(groups),
        *_confounded(groups),
        *_few_seeds(groups),
        *_unfinished(runs),
        *_of_keys(runs, found),
        *_origins(runs),
        *_environments(runs),
    ]


def _repeated(groups: Sequence[RunGroup]) -> Iterator[str]:
    for group in groups:
        for seed, names in group.repeated.items():
            yield f"{group.label}: {', '.join(names)} repeat seed {seed}. They count as one seed, by their mean."


def _confounded(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Groups that differ from the first in several keys."""
    for group in groups[1:]:
        keys = [key for key, value in group.settings.items() if value != groups[0].settings[key]]
        if len(keys) > 1:
            yield (
                f"{group.label} differs from {groups[0].label} in {len(keys)} keys: {', '.join(keys)}. "
                "What a difference is due to cannot be told."
            )


def _few_seeds(groups: Sequence[RunGroup]) -> Iterator[str]:
    single = [group.label for group in groups if len(group.seeds) == 1]
    if single:
        yield f"One seed: {', '.join(single)}. Nothing is known of other seeds."


def _unfinished(runs: Sequence[RunData]) -> Iterator[str]:
    for run in runs:
        done = max((record["step"] for record in run.metrics), default=0)
        if done < (steps := run.setting("run.steps", done)):
            yield f"{run_name(run)} is at step {done} of {steps}."


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


def _origins(runs: Sequence[RunData]) -> Iterator[str]:
    """Where supervised stages were taken from."""
    origins = [run.setting(ORIGIN) for run in runs]
    if len(set(origins)) > 1:
        said = [
            str(origin) if origin else "their own" if run.setting("sft") else "none"
            for run, origin in zip(runs, origins, strict=True)
        ]
        yield f"The runs start from other supervised stages ({ORIGIN}): {_by_value(runs, said)}."


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
    path = RunPaths(run.directory).extensions_record
    found: Mapping[str, str] = read_note(path, operator.itemgetter("files"), {}, "which users' code it ran is unknown")
    return {name: digest[:8] for name, digest in sorted(found.items())}


def _by_value(runs: Sequence[RunData], values: Sequence[Any]) -> str:
    """`x (a, b), y (c)`: each value with its runs."""
    by_value: dict[str, list[RunData]] = {}
    for run, value in zip(runs, values, strict=True):
        by_value.setdefault("unknown" if value is None else shown(value, 60), []).append(run)
    return ", ".join(f"{value} ({_names(members)})" for value, members in by_value.items())


def _names(runs: Sequence[RunData]) -> str:
    names = [*map(run_name, runs)]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
