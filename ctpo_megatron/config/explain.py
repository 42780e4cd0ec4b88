"""Explains mistakes in values: pydantic's errors and broken interpolations, as problems with a remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import ErrorDetails

from ctpo_megatron.config import peers, removed
from ctpo_megatron.config.data_schema import WEIGHTED
from ctpo_megatron.config.keys import known_keys, known_paths, nearest
from ctpo_megatron.config.problems import NO_VALUE, Problem

_NOT_FOUND = re.compile(r"Interpolation key '(\S+)' not found|trying to access (\S+): node `\S+` is not a container")
"""OmegaConf's messages for an interpolation of a missing key or of a key below a scalar."""
_BRANCHES = ("constrained-int", "bool", WEIGHTED)
"""Names that pydantic appends to the key of a union, besides `literal[...]`."""
_NUMBER = "without quotes if it is one"
_OF_TEXT = {
    "tuple_type": "write [{value}]",
    "int_type": _NUMBER,
    "float_type": _NUMBER,
    "bool_type": _NUMBER,
    "string_pattern_mismatch": "letters, digits, `.`, `_` and `-`, and not dots alone",
}
"""Pydantic's type of an error -> what to do, where a text was given."""
_OF_NUMBERS = {"string_type": "quote it: \"'{value}'\" on the command line, '{value}' in YAML"}
"""The same where a number was given."""


def explain_values(details: Iterable[ErrorDetails], where: Callable[[tuple[str, ...]], str]) -> list[Problem]:
    """Return one problem for each key that pydantic refuses. where: gives the place of a key."""
    problems: dict[str, Problem] = {}
    for detail in details:
        keys = tuple(str(part) for part in detail["loc"] if not _is_branch(part))
        key = ".".join(keys)
        if key not in problems:
            problems[key] = replace(_explained(detail, key), where=where(keys))
        elif detail["type"] == "literal_error":  # of a union, whose other branch has come before
            message = f"{problems[key].message}, or {detail['ctx']['expected']}".replace("'", "")
            problems[key] = replace(problems[key], message=message)
        if detail["type"] == "too_short" and any(other.startswith(f"{key}.") for other in problems):
            del problems[key]  # only because its items are wrong, which have their own problems
    return list(problems.values())


def _is_branch(part: str | int) -> bool:
    return part in _BRANCHES or str(part).startswith("literal[")


def _explained(detail: ErrorDetails, key: str) -> Problem:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(key, value)
    if kind == "missing" and isinstance(detail["loc"][-1], str):
        return Problem(key, "required, but not given", f"add it: {_meaning(key)}")
    if kind in ("missing", "too_long", "too_short"):
        fix = f"give at least {context['min_length']}" if "min_length" in context else f"give {_type(key)}"
        return Problem(key, "wrong number of items", fix, NO_VALUE if kind == "missing" else value)
    if kind == "literal_error":
        if isinstance(value, str) and (key, value) in removed.VALUES:
            return Problem(key, "removed", removed.VALUES[key, value], value)
        options = re.findall(r"'([^']*)'", str(context["expected"]))
        near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.5)
        return Problem(key, f"must be one of {', '.join(options)}", did_you_mean(near), value)
    message = str(detail["msg"]).replace("Input should be", "must be").replace("valid ", "").replace("a i", "an i")
    message = "must be a list" if kind == "tuple_type" else message
    fix = ""
    if kind == "model_type":
        fix = "write its keys below it, or remove it to take the defaults"
    elif isinstance(value, str):
        fix = _OF_TEXT.get(kind, "").format(value=value)
    elif isinstance(value, int | float):
        fix = _OF_NUMBERS.get(kind, "").format(value=value)
    return Problem(key, message, fix, value)


def _unknown_key(key: str, value: Any) -> Problem:
    """Advice on an unknown key: what took its place, a peer's name for ours, close matches, or what is known there."""
    if (instead := removed.key_advice(key)) is not None:
        return Problem(key, "removed", instead)
    near = did_you_mean(nearest(key)) or _siblings(key)
    return Problem(key, *(peers.advice(key, value) or ("unknown key", near)), value)


def explain_interpolation(message: str) -> tuple[str, str]:
    """Message and fix for what OmegaConf says of an interpolation."""
    found = _NOT_FOUND.search(message)
    if found is None:
        return message, ""
    name = found[1] or found[2]
    if name in known_paths():
        return f"{name} has no value here", f"give the value itself, or {name}"
    return f"there is no key {name}", did_you_mean(nearest(name))


def did_you_mean(names: Sequence[str]) -> str:
    """Return the question as a fix; empty without a name."""
    return f"did you mean {' or '.join(names)}?" if names else ""


def _siblings(key: str) -> str:
    """The keys of the deepest known section around an unknown key."""
    parent = key.rpartition(".")[0]
    while parent and parent not in known_paths():
        parent = parent.rpartition(".")[0]
    names = [path.rpartition(".")[2] for path in known_paths() if path.rpartition(".")[0] == parent]
    return f"{parent or 'the top level'} has {', '.join(names) or 'no keys below it'}"


def _type(key: str) -> str:
    """Type of the known key at or above a dotted key."""
    return next((known.type for known in known_keys() if f"{key}.".startswith(f"{known.path}.")), "")


def _meaning(key: str) -> str:
    for known in known_keys():
        if known.path == key:
            return f"{known.meaning} ({known.type})"
    return f"a section with {', '.join(k.path for k in known_keys() if k.path.startswith(f'{key}.') and k.required)}"
