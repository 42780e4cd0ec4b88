"""Writes the tables of keys in the pages for users of other trainers, and reference/names.md: `make reference`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; all else on these pages is written by hand.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.config.keys import known_keys
from ctpo_megatron.config.peers import NO_DEFAULT, PEERS, PeerKey, peer_table
from ctpo_megatron.config.problems import show

DOCS = Path(__file__).resolve().parents[1]
PAGES = tuple(f"reference/{name}.md" for name in ("keys_of_trl", "keys_of_verl", "keys_of_nemo_rl_and_slime", "names"))
_PLACE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_LEAST_PEERS = 2
"""Names that fewer trainers have are on the trainer's page alone."""


def peer_pages() -> dict[str, str]:
    """Every page with generated tables: its name below docs, and its text with the tables as they should be."""
    return {page: _PLACE.sub(_replaced, (DOCS / page).read_text(encoding="utf-8")) for page in PAGES}


def _replaced(place: re.Match[str]) -> str:
    kind, _, peer = place[2].partition(" ")
    return f"{place[1]}{chr(10).join(_TABLES[kind](peer))}\n{place[3]}"


def _differing(peer: str) -> Iterator[str]:
    yield from _head(peer_table(peer).peer, "default", "here", "default here", "what differs")
    for key in _of(peer, "differs"):
        told = (f"`{_text(theirs)}` is {_settings(key, ours)}" for theirs, ours in key.values.items() if ours)
        note = "; ".join(filter(None, (key.note, ", ".join(told))))
        yield _row(_theirs(key), _default(key.default), _ours(key), _our_default(key), note)


def _same(peer: str) -> Iterator[str]:
    yield from _head(peer_table(peer).peer, "default", "here", "default here")
    for key in _of(peer, "same"):
        yield _row(_theirs(key), _default(key.default), _ours(key), _our_default(key))


def _absent(peer: str) -> Iterator[str]:
    reasons = defaultdict[str, list[str]](list)
    for key in _of(peer, "not here"):
        reasons[key.note].append(_theirs(key))
    yield from _head(peer_table(peer).peer, "why it is not here")
    yield from (_row(", ".join(names), reason) for reason, names in reasons.items())


def _names(_: str) -> Iterator[str]:
    """Our keys that several trainers have, in the order of the schema."""
    named = defaultdict[str, dict[str, list[str]]](dict)
    for key in _all():
        for ours in key.keys:
            named[ours].setdefault(key.peer, []).append(f"`{key.name}`")
    yield from _by_peer({key.path: named[key.path] for key in known_keys() if key.path in named})


def _values(_: str) -> Iterator[str]:
    """Our values that several trainers have a word for."""
    named = defaultdict[str, dict[str, list[str]]](dict)
    for key in _all():
        for theirs, settings in key.values.items():
            for ours, value in settings.items():
                named[f"{ours}: {_text(value)}"].setdefault(key.peer, []).append(f"`{key.name}: {_text(theirs)}`")
    yield from _by_peer(dict(sorted(named.items())))


_TABLES: Mapping[str, Callable[[str], Iterator[str]]] = {
    "differing": _differing,
    "same": _same,
    "absent": _absent,
    "names": _names,
    "values": _values,
}
"""First word of a table's name -> its lines; the second word is a trainer."""


def _by_peer(named: Mapping[str, Mapping[str, list[str]]]) -> Iterator[str]:
    peers = [peer_table(name).peer for name in PEERS]
    yield from _head("here", *peers)
    for ours, theirs in named.items():
        if len(theirs) >= _LEAST_PEERS:
            yield _row(f"`{ours}`", *(", ".join(theirs.get(peer, ["-"])) for peer in peers))


def _all() -> Iterator[PeerKey]:
    return (key for peer in PEERS for key in peer_table(peer).keys.values() if key.of not in ("earlier", "later"))


def _of(peer: str, verdict: str) -> Iterator[PeerKey]:
    return (key for key in peer_table(peer).keys.values() if key.verdict == verdict)


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield "|" + "---|" * len(cells)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace("|  |", "| |")


def _theirs(key: PeerKey) -> str:
    """The name, and where it is from if not from the configuration."""
    if key.of in ("", "section") or key.name.startswith(key.of):
        return f"`{key.name}`"
    return f"`{key.name}` ({key.of} versions)" if key.of in ("earlier", "later") else f"`{key.name}` of `{key.of}`"


def _ours(key: PeerKey) -> str:
    return ", ".join(f"`{ours}`" for ours in key.keys)


def _our_default(key: PeerKey) -> str:
    (first, *more) = key.keys
    known = next((known for known in known_keys() if known.path == first), None)
    return "" if more or known is None or known.required else _default(known.default)


def _default(value: Any) -> str:
    return "" if value is NO_DEFAULT else f"`{_text(list(value) if isinstance(value, tuple) else value)}`"


def _settings(key: PeerKey, settings: Mapping[str, Any]) -> str:
    """Our keys with their values; values alone where the row has no other key."""
    alone = len(key.keys) == 1 and {*settings} == {*key.keys}
    return ", ".join(f"`{_text(value)}`" if alone else f"`{ours}: {_text(value)}`" for ours, value in settings.items())


def _text(value: Any) -> str:
    """A value as a configuration has it."""
    return value if isinstance(value, str) and value else show(value).replace('"', "")
