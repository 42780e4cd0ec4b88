"""Which keys of config.yaml differ between runs, beyond names, places, addresses and seeds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.config import known_keys, with_defaults
from ctpo_megatron.report.run_data import RunData

NOT_COMPARED = (
    *("run.name", "run.root", "run.overwrite", "run.resume", "run.deadline", "data.rerender", "extensions.path"),
    *("eval.before_training", "eval.every", "sandbox.url", "cluster.node_address"),
    *("checkpoint", "export", "tracking"),
)
"""Keys, and sections, that say where a run is, what it records and how it is watched, not what it learns."""
ADDRESSES = frozenset({"url", "base_url", "host", "port", "address", "endpoint"})
"""Last parts of keys in users' own arguments that are not compared."""
SEED = "seed"
"""Last part of the keys that make runs members of one group."""
ABSENT, GIVEN = "absent", "given"
"""What stands for an argument that a run does not have, and for a section where another run has none."""


@dataclass(frozen=True)
class Differences:
    """What differs between runs; lists have a value for each run, in their order.

    settings: keys that separate groups. seeds: keys that end in `seed`. following: keys whose text has `run.seed` in it
    and differs in nothing else. addresses, unknown: keys that are not compared, because they name a place, or because
    one run lacks them and this version does not know their default.
    """

    settings: dict[str, list[Any]]
    seeds: dict[str, list[Any]]
    following: dict[str, list[Any]]
    addresses: dict[str, list[Any]]
    unknown: dict[str, list[Any]]


def differences(runs: Sequence[RunData]) -> Differences:
    """Compare the configurations of runs, in the order of the schema."""
    found = Differences({}, {}, {}, {}, {})
    run_seeds = [run.setting("run.seed", 0) for run in runs]
    unequal = _unequal("", [_plain(with_defaults(run.config)) for run in runs])
    for key, values in sorted(unequal, key=lambda pair: _rank(pair[0])):
        if any(key == each or key.startswith(f"{each}.") for each in NOT_COMPARED):
            continue
        last = key.rpartition(".")[2]
        if last == SEED:
            found.seeds[key] = values
        elif _same_place(key, values, runs):
            continue
        elif _follows(values, run_seeds):
            found.following[key] = values
        elif _is_argument(key) and last in ADDRESSES:
            found.addresses[key] = values
        elif _is_argument(key) or _known(key) or ABSENT not in values:
            found.settings[key.removesuffix(".name")] = values
        else:
            found.unknown[key] = values
    return found


_SKIPPED = object()
"""In place of a value whose section a run does not have."""


def _unequal(key: str, values: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Dotted keys whose values differ, with the value of each run."""
    if any(map(_is_part, values)):
        values = [{"name": value, "arguments": {}} if isinstance(value, str) else value for value in values]
    sections = [value for value in values if isinstance(value, Mapping)]
    if not sections:
        present = [value for value in values if value is not _SKIPPED]
        if len({_canonical(value) for value in present}) > 1:
            yield key, [ABSENT if value is _SKIPPED else value for value in values]
        return
    if any(not isinstance(value, Mapping) and value is not _SKIPPED for value in values):
        yield key, [GIVEN if isinstance(value, Mapping) else ABSENT if value is _SKIPPED else value for value in values]
    for name in dict.fromkeys(name for section in sections for name in section):
        inner = [value.get(name, ABSENT) if isinstance(value, Mapping) else _SKIPPED for value in values]
        yield from _unequal(f"{key}.{name}" if key else str(name), inner)


def _is_part(value: Any) -> bool:
    """Whether it is `{name, arguments}`, which may be written as the name alone."""
    return isinstance(value, Mapping) and "name" in value and {"name", "arguments"}.issuperset(value)


def _plain(value: Any) -> Any:
    """Parts without arguments as their name."""
    if _is_part(value) and not value.get("arguments"):
        return value["name"]
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _canonical(value: Any) -> str:
    """Equal for equal values: 1 and 1.0 are, True and 1 are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, default=str)


def _mapped(value: Any, change: Any) -> Any:
    """The value with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value


def _same_place(key: str, values: Sequence[Any], runs: Sequence[RunData]) -> bool:
    """Whether the values name the same file, or the same one in each run's own directory."""
    inside = [_mapped(value, _Places(run, _is_argument(key)).own) for value, run in zip(values, runs, strict=True)]
    if len(set(map(_canonical, inside))) == 1:
        return True
    whole = [_mapped(value, _Places(run, False).absolute) for value, run in zip(inside, runs, strict=True)]
    return len(set(map(_canonical, whole))) == 1


class _Places:
    """The places of one run, and texts that name them."""

    def __init__(self, run: RunData, is_argument: bool) -> None:
        """is_argument: whether a part of a path that is the name of the run stands for the run, too."""
        name, root = run.setting("run.name", run.directory.name), run.setting("run.root", "runs")
        self._cwd = str(run.environment.get("directory") or os.getcwd())
        self._name = name if is_argument else None
        own = os.path.join(root, name)
        self._places = [(os.path.join(self._cwd, own), "<run>"), (str(run.directory.absolute()), "<run>")]
        self._places += [(own, "<run>")]

    def own(self, text: str) -> str:
        """The text with marks for directories of the run."""
        for place, mark in self._places:
            text = _in(place, text, mark)
        if self._name:
            # A text that is the name and nothing else may be a setting: runs are often named after theirs.
            text = re.sub(rf"(?<=/){re.escape(self._name)}(?=[/.]|$)|^{re.escape(self._name)}(?=/)", "<name>", text)
        return text

    def absolute(self, text: str) -> str:
        return os.path.normpath(os.path.join(self._cwd, text))


def _in(place: str, text: str, mark: str) -> str:
    """The text with a mark for the directory, where it stands as a whole."""
    return re.sub(rf"(?<![\w./~-])(?:\./)?{re.escape(os.path.normpath(place))}(?=/|$|[^\w.-])", mark, text)


def _follows(values: Sequence[Any], seeds: Sequence[Any]) -> bool:
    """Whether the values are texts that differ in the seed of their run alone."""
    marked = [
        _mapped(value, lambda text, seed=seed: re.sub(rf"(?<![\d.]){seed}(?![\d.]\d|\d)", "<seed>", text))
        for value, seed in zip(values, seeds, strict=True)
    ]
    return len(set(map(_canonical, marked))) == 1


def _leaves() -> frozenset[str]:
    return frozenset(key.path for key in known_keys())


def _is_argument(key: str) -> bool:
    """Whether it is below a key of the schema, in a mapping whose names are the user's."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in _leaves() for end in range(1, len(parts)))


def _rank(key: str) -> int:
    """Its place in the schema; a key that is not there comes last."""
    paths = [leaf.path for leaf in known_keys()]
    return next(
        (n for n, leaf in enumerate(paths) if f"{key}.".startswith(f"{leaf}.") or leaf.startswith(f"{key}.")),
        len(paths),
    )


def _known(key: str) -> bool:
    return any(leaf == key or leaf.startswith(f"{key}.") for leaf in _leaves())
