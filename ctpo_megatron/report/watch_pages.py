"""The pages of `ctpo watch`: results of a search, and one group of trajectories side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from ctpo_megatron.base.files import DamagedFileError, read_mapping
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report.page import report_page
from ctpo_megatron.report.page_data import chart_json, rendered
from ctpo_megatron.report.trajectories.heads import Address, Addressed
from ctpo_megatron.report.trajectories.library import Deadline, SearchResult, TrajectoryLibrary
from ctpo_megatron.report.trajectories.query import TOOLS, Query, snippet
from ctpo_megatron.report.trajectories.ratio import RatioQuantity, ratio_spec
from ctpo_megatron.report.trajectories.view import Budget, GroupView, view_of
from ctpo_megatron.tracking import Head, records_at

PAGE_SIZE = 25
SEARCH_S = 10.0
"""What a request may take to look through dumps."""
WAIT_S = 20.0
"""What it waits for another one to end."""
REPORT_S = 15.0
"""A report is at least as old before it is made again: that takes a few CPU-seconds."""
MOST_SAMPLES = 16
"""Of a group, side by side."""
TOKENS, CHARACTERS = 40_000, 60_000
"""Of a group: tokens shown one by one, and characters of a piece of text."""
FINISH_REASONS = ("answer", "length", "max_turns", "tool_budget")


class BusyError(Exception):
    """Other requests are read for; the message says what to do."""


@dataclass(frozen=True)
class Snippet:
    """A result of a search as it is listed. found: what stands before, at and after the text that was looked for."""

    address: Address
    reward: float | None
    tools: str
    facts: str
    question: str
    found: tuple[str, str, str] | None


@dataclass(frozen=True)
class _Made:
    """A report. stamp: of the files that it was made of. made: when, by `time.monotonic`."""

    page: str
    stamp: object
    made: float


class WatchPages:
    """Pages of a run directory, which is read only. Requests of several threads are served one after the other."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.stopped: Callable[[], bool] = lambda: False
        self._library, self._lock = TrajectoryLibrary(run_dir), threading.Lock()
        self._report: _Made | None = None
        self._report_lock = threading.Lock()

    def report(self) -> str:
        """The report, made again when files of the run have changed, but not more often than every `REPORT_S`.

        Raises DamagedFileError, FileNotFoundError.
        """
        with self._report_lock:
            stamp, now = _stamp(self.run_dir), time.monotonic()
            if self._report is None or (stamp != self._report.stamp and now > self._report.made + REPORT_S):
                self._report = _Made(report_page(self.run_dir), stamp, time.monotonic())
            return self._report.page

    def results(self, fields: Mapping[str, str]) -> str:
        """The page of a query string. Raises QueryError, BusyError."""
        query = Query.parse(fields)
        with self._library_until() as (library, deadline):
            found = library.search(query, PAGE_SIZE, deadline)
        return self._page(
            "watch_results.html.jinja",
            query=query,
            found=found,
            said=_said(found),
            results=[_snippet(hit.address, hit.head, hit.record, query.text) for hit in found.hits],
            first=(query.page - 1) * PAGE_SIZE + 1,
            before=_address(query, query.page - 1) if query.page > 1 else None,
            after=_address(query, query.page + 1) if found.more else None,
            tools=TOOLS,
            finish_reasons=FINISH_REASONS,
        )

    def group(self, text: str) -> str | None:
        """The page of the group of a trajectory; None where there is none of this address.

        Raises DamagedFileError, BusyError, OutOfTimeError.
        """
        if (address := Address.parse(text)) is None:
            return None
        with self._library_until() as (library, deadline):
            if (found := library.group(address, deadline)) is None:
                return None
            dump, heads = found
            before, after = library.neighbours(dump, heads, deadline)
            shown = _shown(address, heads)
            records = records_at(dump.path, [head.place for _, head in shown])
        quantity, budget = self._quantity(), Budget(TOKENS, CHARACTERS)
        own_first = sorted(range(len(shown)), key=lambda place: shown[place][0] != address)
        views = {place: view_of(shown[place][0], records[place], quantity, budget) for place in own_first}
        group = GroupView([views[place] for place in range(len(shown))], heads)
        return self._page(
            "watch_group.html.jinja",
            group=group,
            address=address,
            quantity=quantity,
            ratio_spec=ratio_spec(quantity),
            before=before,
            after=after,
        )

    def problem(self, title: str, message: str) -> str:
        """The page of a request that was not served."""
        return self._page("watch_problem.html.jinja", problem=title, message=message)

    def _page(self, template: str, **values: Any) -> str:
        return rendered(template, run=self.run_dir, chart_data=Markup(chart_json([])), **values)

    @contextmanager
    def _library_until(self) -> Iterator[tuple[TrajectoryLibrary, Deadline]]:
        if not self._lock.acquire(timeout=WAIT_S):
            raise BusyError(f"other requests have been searching for {WAIT_S:g} s; wait for them and reload")
        try:
            yield self._library, Deadline(time.monotonic() + SEARCH_S, self.stopped)
        finally:
            self._lock.release()

    def _quantity(self) -> RatioQuantity:
        try:
            return RatioQuantity.of(read_mapping(RunPaths(self.run_dir).config).get("objective"))
        except (DamagedFileError, OSError):
            return RatioQuantity.of(None)  # the page does without the name


def _shown(address: Address, heads: Sequence[Addressed]) -> list[Addressed]:
    """At most `MOST_SAMPLES` of a group: best and worst, if they differ, the one asked for, then the first."""
    judged = sorted((each for each in heads if each[1].reward is not None), key=lambda each: each[1].reward or 0.0)
    ends = [judged[-1], judged[0]] if judged and judged[-1][1].reward != judged[0][1].reward else []
    others = heads if len(heads) <= MOST_SAMPLES else [*(each for each in heads if each[0] == address), *heads]
    return list(dict.fromkeys([*ends, *others]))[:MOST_SAMPLES]


def _snippet(address: Address, head: Head, record: Mapping[str, Any], text: str) -> Snippet:
    texts = [str(part.get("text", "")) for part in record.get("segments") or ()]
    outputs = [str(call.get("output", "")) for call in record.get("tool_calls") or ()]
    prompt = texts[0] if texts else head.prompt_id
    lines = [line for line in prompt.replace("<|im_end|>", "\n").splitlines() if line.strip() and "<|im_" not in line]
    facts = f"{head.model_tokens:,} tokens · {head.finish_reason or 'not ended'}"
    facts += f" · no verdict: {head.cause}" if head.cause else ""
    found = snippet([*texts, *outputs], text) if text else None
    return Snippet(address, head.reward, head.tools, facts, (lines or [head.prompt_id])[-1][:300], found)


def _stamp(run_dir: Path) -> object:
    """Differs when the run has written what the report shows."""
    paths = RunPaths(run_dir)
    files = (paths.metrics, paths.sft_metrics, paths.positions, paths.stages, paths.trajectories, paths.evaluation)
    return [(status.st_mtime_ns, status.st_size) for path in files if path.exists() for status in [path.stat()]]


def _said(found: SearchResult) -> str:
    """How complete the results are."""
    if found.late:
        return (
            f"Stopped after {SEARCH_S:g} s, with {found.searched} of {found.dumps} dumps searched. "
            "Reload to continue from there, or choose steps."
        )
    if found.total is not None:
        return f"{found.total:,} trajector{'y' if found.total == 1 else 'ies'} in {found.dumps} dumps"
    return f"{found.searched} of {found.dumps} dumps searched for this page"


def _address(query: Query, page: int) -> str:
    return "/trajectories?" + urlencode(query.model_copy(update={"page": page}).fields())
