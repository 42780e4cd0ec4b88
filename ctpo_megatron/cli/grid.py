"""Grids of a sweep: values on a command line, and the names of the runs that have them."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ctpo_megatron.config import ConfigError, Problem, short_names

FIXED = ("run.name", "run.root", "run.resume", "run.overwrite", "run.deadline")
"""Keys that the sweep decides itself."""
GridPoint = dict[str, str]
"""Key -> value, in the order in which a name has them."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def read_grid(items: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return key -> values of the grid, and the overrides of all runs: a key with one value is one, too.

    Raises ConfigError with every mistake.
    """
    grid: dict[str, list[str]] = {}
    common, problems = list(overrides), list[Problem]()
    for item in items:
        key, _, text = item.partition("=")
        values = split_values(text)
        if len(values) == 1:
            common.append(item)
        elif key in grid:
            problems.append(Problem(key, "is there twice", "give all its values at once", text, "--grid"))
        else:
            grid[key] = values
    given = {text.partition("=")[0] for text in common}
    for key, values in grid.items():
        if key in FIXED:
            problems.append(Problem(key, "cannot vary: the sweep decides it", "leave it out", where="--grid"))
        if key in given:
            problems.append(Problem(key, "is an override, too: which counts?", "give it once", where="--grid"))
        if len(set(values)) < len(values) or "" in values:
            text = ",".join(values)
            problems.append(Problem(key, "has an empty value, or one twice", "give every value once", text, "--grid"))
    if not grid:
        fix = "give a key several, e.g. --grid run.seed=0,1,2; one run is `ctpo train`"
        problems.append(Problem("", "no key has more than one value", fix, where="--grid"))
    if problems:
        raise ConfigError(problems)
    return grid, common


def points_of(grid: Mapping[str, Sequence[str]]) -> dict[str, GridPoint]:
    """Return the name of each point and its keys; the last key varies fastest.

    A name follows from the values alone, such as `ctpo-seed0`, so that a grid can grow.
    """
    return {name_of(point, among=grid): point for point in product(grid)}


def product(values: Mapping[str, Sequence[str]]) -> Iterator[GridPoint]:
    """Yield all combinations, of which the last key varies fastest; without keys one empty point."""
    yield from (dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))


def name_of(point: GridPoint, among: Iterable[str]) -> str:
    """Return the name of a point. among: all keys that vary, which decides how short theirs may be."""
    labels = short_names(point, among=among)
    return "-".join(_part(key, labels[key], value) for key, value in point.items())


def split_values(text: str) -> list[str]:
    """Return the texts between commas that are in no quotes or brackets."""
    return [value.strip() for value in _split(text)]


def _split(text: str) -> Iterator[str]:
    part, depth, quote = "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{(") - (character in ")}]")
        if character == "," and not quote and depth <= 0:
            yield part
            part = ""
        else:
            part += character
    yield part


def _part(key: str, label: str, value: str) -> str:
    """A value in a name; a digest tells values apart that a name cannot hold."""
    text = value if key == "objective.preset" else f"{label}{'' if _NUMBER.fullmatch(value) else '_'}{value}"
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:40]
    if plain == text:
        return text
    return f"{plain.strip('_')}.{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}"
