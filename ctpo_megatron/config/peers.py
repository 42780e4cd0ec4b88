"""Keys of TRL, verl, NeMo-RL and slime: what each is here, or why it is not here.

The tables are `peer_tables/*.yaml`, one a trainer. The answer to an unknown key, the pages for users of these trainers
and docs/reference/names.md follow from them. A row has, by the other trainer's name of a key:

    default   its value there; left out where there is none, or where another key decides it
    of        where the name is from, if not from the configuration: a class, a section, an earlier or later version
    here      our key or keys
    values    a value there -> our keys with the value that means the same
    note      what differs; without a note, and with the same values, it means the same here
    reason    instead of `here`: a word of `peer_tables/reasons.yaml`

TRL's names are arguments of `GRPOConfig` and `GRPOTrainer`. verl's are without `actor_rollout_ref`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ctpo_megatron.config.keys import flattened, known_paths

PEER_TABLES = Path(__file__).with_name("peer_tables")
PEERS = ("trl", "verl", "nemo_rl", "slime")
"""Names of the tables; where two trainers have a name, the first one answers."""
NO_DEFAULT: Any = object()
_SHOWN = 6


@dataclass(frozen=True, eq=False)
class PeerKey:
    """A key of another trainer, and what it is here.

    peer: whose key; empty for a word of the field. keys: ours; none: it is not here, and `note` says why. page: where
    more is said of a reason.
    """

    peer: str
    name: str
    keys: tuple[str, ...]
    note: str = ""
    page: str = ""
    default: Any = NO_DEFAULT
    of: str = ""
    values: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """`same`, `differs` or `not here`."""
        if not self.keys:
            return "not here"
        alike = all([theirs] == [*ours.values()] for theirs, ours in self.values.items())
        return "same" if alike and not self.note else "differs"

    @property
    def advice(self) -> tuple[str, str]:
        """What is wrong with such a key, and what to do."""
        if not self.keys:
            return self.note, f"remove the key{self.page and f' ({self.page})'}"
        return "unknown key", f"{self.peer}'s name for {self.here}"

    @property
    def here(self) -> str:
        """Our keys and the note, or the reason why there are none."""
        note = f" ({self.note})" if self.note else ""
        return " and ".join(self.keys) + note if self.keys else self.note


@dataclass(frozen=True)
class PeerTable:
    """The keys of one trainer. read: the version, or the commit and file, that they were read from."""

    peer: str
    read: str
    keys: Mapping[str, PeerKey]


@cache
def peer_table(name: str) -> PeerTable:
    """Returns the table of this name (`PEERS`)."""
    raw = _read(name)
    peer = raw["peer"]
    return PeerTable(peer, raw["read"], {key: _entry(peer, key, row) for key, row in raw["keys"].items()})


def answer(path: str) -> PeerKey | None:
    """Returns the entry for a dotted key, in any section; None if there is no entry."""
    fitting = [(near, told) for name, told in _entries() if (near := _nearness(path, name, told.keys)) is not None]
    if fitting:
        return min(fitting, key=lambda entry: entry[0])[1]
    last = path.rpartition(".")[2]
    reasons = (name for name, reason in _read("reasons").items() if re.search(reason.get("words", "$^"), last))
    return next((_entry("", last, {"reason": name}) for name in reasons), None)


def advice(path: str, value: Any) -> tuple[str, str] | None:
    """Returns what is wrong with an unknown key or section, and what to do; None if there is no entry for it."""
    leaves = [path]
    if isinstance(value, Mapping):
        leaves = [key for key, _ in flattened(value, f"{path}.")] or leaves
    answers = {leaf: told for leaf in leaves if (told := _nearest_answer(leaf, path)) is not None}
    if not answers:
        return None
    if len({told.advice for told in answers.values()}) == 1:
        return next(iter(answers.values())).advice
    peers = " and ".join(dict.fromkeys(told.peer for told in answers.values() if told.peer)) or "other trainers"
    lines = [f"{leaf}{' is' if told.keys else ':'} {told.here}" for leaf, told in answers.items()]
    more = f"; {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "unknown key", f"of {peers}: {'; '.join(lines[:_SHOWN])}{more} (docs/reference/names.md)"


def _read(name: str) -> dict[str, Any]:
    return _parsed(PEER_TABLES / f"{name}.yaml")


@cache
def _parsed(file: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return parsed


def _entry(peer: str, name: str, row: Mapping[str, Any]) -> PeerKey:
    told: dict[str, Any]
    if "reason" in row:
        reason = _read("reasons")[row["reason"]]
        told = {"keys": (), "note": reason["text"], "page": reason.get("page", "")}
    else:
        keys: str | Sequence[str] = row["here"]
        told = {"keys": (keys,) if isinstance(keys, str) else tuple(keys), "note": row.get("note", "")}
    return PeerKey(peer, name, **told, **{key: row[key] for key in ("default", "of", "values") if key in row})


@cache
def _entries() -> tuple[tuple[str, PeerKey], ...]:
    """Every entry by its name as a configuration would have it: slime's without dashes."""
    return tuple(
        (name.lstrip("-").replace("-", "_"), told) for peer in PEERS for name, told in peer_table(peer).keys.items()
    )


def _nearest_answer(leaf: str, top: str) -> PeerKey | None:
    """The answer to a key, else to the closest section around it, up to `top`."""
    while len(leaf) >= len(top):
        if (told := answer(leaf)) is not None:
            return told
        leaf = leaf.rpartition(".")[0]
    return None


def _nearness(path: str, name: str, keys: tuple[str, ...]) -> tuple[int, int] | None:
    """How well a path fits an entry, the least best; None: not at all."""
    section, _, last = path.rpartition(".")
    if path == name:
        return 0, 0
    if path.endswith(f".{name}"):
        # One word may mean something else: it counts where our key is, or in a section of the top level.
        its_place = keys[0].rpartition(".")[0] if keys else section.partition(".")[0]
        return None if name.isalnum() and section != its_place else (1, -len(name))
    if name.endswith(f".{path}") and not path.isalnum():
        return 2, len(name)
    alike = "_" in last and last == name.rpartition(".")[2] and last not in _last_names()
    return (3, len(name)) if alike else None


@cache
def _last_names() -> frozenset[str]:
    """Of our keys."""
    return frozenset(path.rpartition(".")[2] for path in known_paths())
