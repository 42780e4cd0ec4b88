"""Reads `--grid objective.preset=ctpo,grpo run.seed=0,1`: keys with their values, and the names of the runs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctpo_megatron.config import ConfigError, Problem, short_names

SEED = "run.seed"
_WHERE = "--grid"
_PRESET = "objective.preset"
_FIXED = {
    "run.name": "the sweep names the runs",
    "run.root": "the runs of a sweep are in one folder",
    "run.overwrite": "give another run.name to begin a sweep again",
    "run.resume": "a sweep continues what is there",
    "run.deadline": "it is of the whole sweep",
    "run.accept_changed_code": "it is of one start",
    "data.rerender": "it is of one start",
    "prepare.directory": "runs that share a task find it there",
    "sft.export": "the runs start from the model of SFT",
}
"""Keys that the runs of a sweep have in common, and why."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_IN_NAMES = re.compile(r"[^A-Za-z0-9.-]+")
"""What becomes one underscore."""
_LONGEST_PART = 40
_CLOSES = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class GridAxis:
    """A key, and the texts of its values as on the command line."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep, and the overrides that all its runs have."""

    axes: tuple[GridAxis, ...]
    overrides: tuple[str, ...]

    def points(self) -> Iterator[dict[str, str]]:
        """Key and value of every run; the last axis varies fastest."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield dict(zip((axis.key for axis in self.axes), values, strict=True))

    def name(self, point: dict[str, str]) -> str:
        """A name from these values alone, such as `ctpo-seed0`: part of a run's name, the same in every larger grid."""
        keys = [axis.key for axis in self.axes]
        labels = short_names(keys, among=keys)
        return "-".join(_part(key, labels[key], value) for key, value in point.items())


def read_grid(items: Sequence[str], overrides: Sequence[str]) -> Grid:
    """Items with several values are axes, others are overrides as those before `--grid`.

    Raises ConfigError with every mistake.
    """
    axes: list[GridAxis] = []
    common = list(overrides)
    for item in items:
        key, equals, text = item.partition("=")
        values = tuple(value.strip() for value in _split(text))
        if equals and len(values) > 1:
            axes.append(GridAxis(key.strip(), values))
        else:
            common.append(item)
    if problems := list(_problems(axes, common)):
        raise ConfigError(problems)
    return Grid(tuple(axes), tuple(common))


def _split(text: str) -> list[str]:
    """Text between commas that are in no quotes or brackets."""
    parts, open_, quote = [""], list[str](), ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSES:
            open_.append(_CLOSES[character])
        elif open_ and character == open_[-1]:
            open_.pop()
        elif character == "," and not open_:
            parts.append("")
            continue
        parts[-1] += character
    return parts


def _problems(axes: Sequence[GridAxis], overrides: Sequence[str]) -> Iterator[Problem]:
    if not axes:
        fix = "give one or more keys several, e.g. --grid run.seed=0,1,2; one run is `ctpo train`"
        yield Problem("", "no key has more than one value", fix, where=_WHERE)
    given = [text.partition("=")[0].strip() for text in overrides if "=" in text]
    seen = set[str]()
    for axis in axes:
        shown = ",".join(axis.values)
        if axis.key in seen:
            yield Problem(axis.key, "is there twice", "give all its values at once", shown, _WHERE)
        seen.add(axis.key)
        if "" in axis.values:
            yield Problem(axis.key, "has an empty value", "remove a comma; an empty text is '\"\"'", shown, _WHERE)
        if twice := sorted({value for value in axis.values if axis.values.count(value) > 1}):
            yield Problem(axis.key, f"has {', '.join(twice)} twice", "give every value once", shown, _WHERE)
        if (why := _FIXED.get(axis.key)) is not None:
            yield Problem(axis.key, f"cannot vary: {why}", "leave it out", shown, _WHERE)
        for other in dict.fromkeys([*given, *(each.key for each in axes if each is not axis)]):
            if other == axis.key and other in given:
                yield Problem(axis.key, "is an override, too: which counts?", "give it once", shown, _WHERE)
            elif other.startswith(f"{axis.key}.") or axis.key.startswith(f"{other}."):
                yield Problem(axis.key, f"and {other} set the same keys", "vary one of them", shown, _WHERE)


def _part(key: str, label: str, value: str) -> str:
    """A value in a name. What a name cannot hold is replaced, and then a digest tells equal remainders apart."""
    text = value if key == _PRESET else f"{label}{value}" if _NUMBER.fullmatch(value) else f"{label}_{value}"
    plain = _IN_NAMES.sub("_", text)[:_LONGEST_PART]
    if plain == text:
        return text
    return f"{plain.strip('_')}.{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}"
