"""A job of another trainer with our keys: what it sets and that trainer's defaults, each the same or what differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.config import NO_DEFAULT, PeerKey, PolicyObjective, peer_table
from ctpo_megatron.init.prompts import InitError

Row = tuple[str, str, str]
"""Theirs, ours, and what became of it."""
RESPONSE_KEY = "rollout.max_response_tokens"


@dataclass(frozen=True)
class PeerJob:
    """A job with our keys. settings: dotted key -> value. response: the other trainer's name for its longest one."""

    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    response: str = ""


@dataclass(frozen=True)
class Rules:
    """How the jobs of a trainer are translated, beyond its table.

    names: keys of which several decide one of ours, or whose unit is another one. computed: our keys for these, from
    all values of a job, and `rows` of its data; they raise InitError for what cannot be the same here. different: what
    the table does not say, from all values and our keys. of: rows of the table to use.
    """

    peer: str
    names: frozenset[str]
    computed: tuple[Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]], ...]
    different: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[Row]]
    of: frozenset[str] = frozenset({""})


def translated(given: Mapping[str, Any], rules: Rules, rows: int) -> PeerJob:
    """Return the job in our keys. rows: of the data, for epochs. Raises InitError for what cannot be the same here."""
    whole = peer_table(rules.peer)
    table = {name: key for name, key in whole.keys.items() if key.of in rules.of}
    values = {name: key.default for name, key in table.items() if key.default is not NO_DEFAULT}
    values |= {name: value for name, value in given.items() if value is not NO_DEFAULT} | {"rows": rows}
    try:
        computed = dict(setting for part in rules.computed for setting in part(values))
        different = [*rules.different(values, computed)]
    except InitError:
        raise
    except (TypeError, KeyError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise InitError(f"--from: a value has another type than {whole.peer}'s: {error}") from error
    settings: dict[str, Any] = {}
    told: list[Row] = []
    covered: set[str] = set()
    # What the job sets comes last: two names may be one key here.
    for name, key in sorted(table.items(), key=lambda item: item[0] in given):
        ours: dict[str, Any] | None = {path: computed[path] for path in key.keys if path in computed}
        if name not in rules.names:
            ours = _settings(key, values[name]) if name in values else None
            settings |= ours or {}
        if name in given:
            covered |= {*(ours or {})}
            told.append(_row(whole.peer, key, given[name], ours))
    settings |= computed
    told += _unknown({name: value for name, value in given.items() if name not in table}, whole.keys)
    default = f"{whole.peer}'s default"
    told += [(default, f"{key}: {value}", "same") for key, value in settings.items() if key not in covered]
    response = next(name for name, key in table.items() if RESPONSE_KEY in key.keys)
    return PeerJob(settings, (*told, *different), response)


def preset(name: str, **fields: Any) -> Iterator[tuple[str, Any]]:
    """Our keys for a preset, and for its fields that have other values in a job."""
    yield "objective.preset", name
    usual = PolicyObjective.preset(name)
    for field, value in fields.items():
        if value != getattr(usual, field):
            yield f"objective.{field}", -1 if value is None else value


def _settings(key: PeerKey, value: Any) -> dict[str, Any] | None:
    """Returns our keys with the value of a key that needs no other one; None where it has to be set by hand."""
    if key.name == "scale_rewards" and isinstance(value, bool):
        value = "group" if value else "none"
    if key.values:
        word = value[0] if isinstance(value, list) and len(value) == 1 else value
        known = isinstance(word, str | bool) and word in key.values
        return dict(key.values[word]) if known else None
    if key.verdict != "same" or (isinstance(value, str) and isinstance(key.default, float)):
        return None
    return {} if value in (None, {}) else {key.keys[0]: value}


def _row(peer: str, key: PeerKey, value: Any, ours: Mapping[str, Any] | None) -> Row:
    """The row of a key that the job sets."""
    names = ", ".join(key.keys)
    if value is NO_DEFAULT:
        return key.name, names, f"is not a literal: set it by hand; it has {peer}'s default"
    theirs = f"{key.name}={value!r}"
    if not key.keys:
        return theirs, "", f"not here: {key.note}"
    if ours is None:
        return theirs, names, f"differs, set it by hand: {key.note or 'there is no such value'}"
    settings = ", ".join(f"{name}: {setting}" for name, setting in ours.items()) or names
    return theirs, settings, f"differs: {key.note}" if key.note else "same"


def _unknown(given: Mapping[str, Any], keys: Mapping[str, PeerKey]) -> Iterator[Row]:
    """Rows of names without an entry, one for each section; a section may have an entry of its own."""
    sections = defaultdict[str, list[str]](list)
    for name in given:
        sections[name.rpartition(".")[0] or name].append(name)
    for section, names in sections.items():
        last, above = ", ".join(name.rpartition(".")[2] for name in names), section
        value = "" if len(names) > 1 or given[names[0]] is NO_DEFAULT else f"={given[names[0]]!r}"
        while above and (above not in keys or keys[above].of != "section"):
            above = above.rpartition(".")[0]
        fate = f"not here: {keys[above].here}" if above else "not in the table: ignored"
        yield f"{section}: {last}" if len(names) > 1 else f"{names[0]}{value}", "", fate
