"""All trajectories of a run: found by filters and text, and group by group, while the run may still write."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.report.trajectories.heads import FOLDERS, Address, Addressed, HeadTable, Source
from ctpo_megatron.report.trajectories.query import Query
from ctpo_megatron.tracking import Head, Record, read_heads, read_texts, records_at, trajectory_files

MOST_HEADS = 2_000_000
"""Trajectories whose heads are kept in memory, about 35 bytes each."""
MOST_MATCHES = 4_096
"""Dumps in which the places of a text are kept."""

T = TypeVar("T")
Places = NDArray[np.int64]


class OutOfTimeError(Exception):
    """The deadline of a search; what was read until then is kept for the next."""


@dataclass(frozen=True)
class Deadline:
    """at: by `time.monotonic`. stopped: whether it ends before."""

    at: float
    stopped: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Raises OutOfTimeError."""
        if self.stopped() or time.monotonic() > self.at:
            raise OutOfTimeError


@dataclass(frozen=True)
class Dump:
    """A file, as it was when it was listed. stamp: changes with its content."""

    source: Source
    step: int
    path: Path
    stamp: tuple[int, int, int]


@dataclass(frozen=True)
class Hit:
    """One result, with the record from which it is shown."""

    address: Address
    head: Head
    record: Record


@dataclass(frozen=True)
class SearchResult:
    """A page of results.

    total: of all pages; None where there are more than were looked for. searched, dumps: files that were, and that
    there are; less where the deadline came (`late`). problems: of files that could not be read.
    """

    hits: list[Hit]
    more: bool
    total: int | None
    searched: int
    dumps: int
    late: bool
    problems: list[str]


class TrajectoryLibrary:
    """The dumps of a run directory. For one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._heads: OrderedDict[Dump, HeadTable] = OrderedDict()
        self._matches: OrderedDict[tuple[Dump, str], Places] = OrderedDict()
        self._unfinished: dict[tuple[Dump, str | None], _Reading[Head] | _Reading[bool]] = {}

    def dumps(self) -> list[Dump]:
        """The dumps that are there now, in the order in which they were written; also damaged ones."""
        found = []
        for source, folder in FOLDERS.items():
            for step, path in trajectory_files(self._run_dir, folder).items():
                try:
                    status = path.stat()
                except FileNotFoundError:  # a resumed run has just discarded it
                    continue
                found.append(Dump(source, step, path, (status.st_ino, status.st_mtime_ns, status.st_size)))
        return sorted(found, key=lambda dump: (dump.step, dump.source == "evaluation"))

    def heads(self, dump: Dump, deadline: Deadline) -> HeadTable:
        """The heads of a dump. Raises DamagedFileError, OutOfTimeError."""
        if dump not in self._heads:
            heads = self._finished((dump, None), lambda: iter(read_heads(dump.path)), deadline)
            self._heads[dump] = HeadTable.of(heads)
            while len(self._heads) > 1 and sum(map(len, self._heads.values())) > MOST_HEADS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(dump)
        return self._heads[dump]

    def search(self, query: Query, size: int, deadline: Deadline) -> SearchResult:
        """A page of `size` results. It ends at the deadline; the next call continues from there."""
        dumps = [d for d in self.dumps() if query.source in ("", d.source) and query.has_step(d.step)]
        if query.order != "oldest":
            dumps.reverse()
        by_step = query.order in ("newest", "oldest")
        wanted = query.page * size
        found, problems = _Ranking(query), list[str]()
        late, searched = False, 0
        for dump in dumps:
            if by_step and len(found) > wanted:
                break
            try:
                heads = self.heads(dump, deadline)
                found.add(dump, heads, self._places(dump, heads, query, deadline))
            except DamagedFileError as error:
                problems.append(str(error))
            except OutOfTimeError:
                late = True
                break
            searched += 1
        shown = found.ranked()[wanted - size : wanted]
        complete = searched == len(dumps)
        total = len(found) if complete else None
        hits = self._hits(shown, problems)
        return SearchResult(hits, len(found) > wanted, total, searched, len(dumps), late, problems)

    def group(self, address: Address, deadline: Deadline) -> tuple[Dump, list[Addressed]] | None:
        """The dump of a trajectory, and all samples of its prompt in it; None where there is no such trajectory.

        Raises DamagedFileError, OutOfTimeError.
        """
        for dump in self.dumps():
            if (dump.source, dump.step) == (address.source, address.step):
                heads = self.heads(dump, deadline)
                places = np.flatnonzero(heads.prompts.where(lambda name: name == address.prompt_id)).tolist()
                group = [(heads.address(dump.source, dump.step, place), heads.head(place)) for place in places]
                return (dump, group) if any(each == address for each, _ in group) else None
        return None

    def neighbours(self, dump: Dump, heads: list[Addressed], deadline: Deadline) -> list[Address | None]:
        """A trajectory of the group before this one in a dump, and of the group after it."""
        table = self.heads(dump, deadline)
        before, after = heads[0][1].place - 1, heads[-1][1].place + 1
        return [
            table.address(dump.source, dump.step, place) if 0 <= place < len(table) else None
            for place in (before, after)
        ]

    def _places(self, dump: Dump, heads: HeadTable, query: Query, deadline: Deadline) -> Places:
        kept = query.mask(heads)
        if query.text and kept.any():
            has = np.zeros(len(heads), np.bool_)
            has[self._with_text(dump, query.text.casefold(), deadline)] = True
            kept &= has
        return np.flatnonzero(kept)

    def _with_text(self, dump: Dump, text: str, deadline: Deadline) -> Places:
        key = (dump, text)
        if key not in self._matches:
            found = self._finished(key, lambda: _having(dump.path, text), deadline)
            self._matches[key] = np.flatnonzero(found)
            while len(self._matches) > MOST_MATCHES:
                self._matches.popitem(last=False)
        self._matches.move_to_end(key)
        return self._matches[key]

    def _finished(self, key: tuple[Dump, str | None], begin: Callable[[], Iterator[T]], deadline: Deadline) -> list[T]:
        """All that a file yields; what was read before a deadline is not read again."""
        reading = self._unfinished.pop(key, None) or _Reading(begin())
        try:
            return reading.finish(deadline)  # type: ignore[return-value]  # the key says of which kind it is
        except OutOfTimeError:
            self._unfinished.clear()  # each holds a file open
            self._unfinished[key] = reading  # type: ignore[assignment]
            raise

    def _hits(self, shown: list[tuple[Dump, int]], problems: list[str]) -> list[Hit]:
        by_dump: dict[Dump, list[int]] = {}
        for dump, place in shown:
            by_dump.setdefault(dump, []).append(place)
        records: dict[tuple[Dump, int], Record] = {}
        for dump, places in by_dump.items():
            try:
                records |= {(dump, place): r for place, r in zip(places, records_at(dump.path, places), strict=True)}
            except (DamagedFileError, LookupError, ValueError) as error:
                problems.append(f"{dump.path} changed or is damaged ({error})")
        hits = []
        for dump, place in shown:
            if (record := records.get((dump, place))) is not None:
                heads = self.heads(dump, Deadline(math.inf))  # nearly always kept
                hits.append(Hit(heads.address(dump.source, dump.step, place), heads.head(place), record))
        return hits


def _having(path: Path, text: str) -> Iterator[bool]:
    return (any(text in each.casefold() for each in texts) for texts in read_texts(path))


class _Reading(Generic[T]):
    """Something that is read in turns, each as long as its deadline lets it."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items, self._taken = items, list[T]()

    def finish(self, deadline: Deadline) -> list[T]:
        for item in self._items:
            self._taken.append(item)
            deadline.check()
        return self._taken


class _Ranking:
    """Trajectories in the order of a query; dumps are added in order."""

    def __init__(self, query: Query) -> None:
        self._order = query.order
        self._dumps: list[Dump] = []
        self._parts: list[tuple[NDArray[np.float64], NDArray[np.int32], Places]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, dump: Dump, heads: HeadTable, places: Places) -> None:
        keys = {
            "reward": heads.reward[places],
            "length": heads.model_tokens[places].astype(np.float64),
        }.get(self._order.lstrip("-"), np.zeros(len(places)))
        sign = -1 if self._order.startswith("-") else 1
        self._parts.append((sign * keys, np.full(len(places), len(self._dumps), np.int32), places))
        self._dumps.append(dump)
        self._count += len(places)

    def ranked(self) -> list[tuple[Dump, int]]:
        """Dump and place of each; without a reward last."""
        if not self._count:
            return []
        keys, dumps, places = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        order = np.argsort(keys, kind="stable")  # NaN comes last
        return [(self._dumps[dumps[row]], int(places[row])) for row in order.tolist()]
