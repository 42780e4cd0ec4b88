"""The time line of one step: what ranks, engines, tools and scorers did at the same time.

Ranks and engines are read from the traces of `run.profile_steps`, tools and scorers from the dumps of trajectories.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import RunPaths, step_in, step_name
from ctpo_megatron.report.charts import Axis, Chart, Curve, Span, timeline
from ctpo_megatron.report.metric_charts import PHASE_COLOURS
from ctpo_megatron.tracking import read_times, trajectory_files

log = logging.getLogger(__name__)

LARGEST = 1 << 25
"""Bytes of a trace that is read, compressed: larger ones are for Perfetto alone."""
_CAPTION = (
    "Phases of each rank of the trainer, when each engine samples, when at least one tool runs, and when at least one "
    "trajectory is with the scorers; what is blank is not in the traces. Of an engine, only the first 256 steps are."
)
_FILE = re.compile(r"step_(\d{6,})_(rank|engine)_(\d+).*\.json\.gz")
_SAMPLES, _TOOLS, _OTHER = "engine samples", "tool runs", "other"
_COLOURS = {**PHASE_COLOURS, _SAMPLES: "muted", _TOOLS: "muted"}
_ROWS = ("rank", "engine", "tools", "scoring")
_FINEST = 1 / 500
"""Share of the step below which a gap between equal spans is not drawn."""


def step_timeline(directory: Path) -> Chart | None:
    """The time line of the latest step that has a trace of rank 0; None without one, or where it is too large.

    Traces and dumps that are damaged are left out, with a line in the log.
    """
    found: dict[int, dict[str, Path]] = {}
    for path in sorted(RunPaths(directory).profile.glob("*.json.gz")):
        if (match := _FILE.fullmatch(path.name)) and path.stat().st_size <= LARGEST:
            found.setdefault(int(match[1]), {})[f"{match[2]} {match[3]}"] = path
    steps = [step for step, files in found.items() if "rank 0" in files]
    if not steps or not (ranges := {row: list(_ranges(path)) for row, path in found[max(steps)].items()}):
        return None
    whole = [each for each in ranges["rank 0"] if each.kind == step_name(max(steps))]
    if not whole:
        return None
    ranges |= _behind(directory, max(steps), whole[0])
    spans = [
        replace(each, row=row, start=max(0.0, each.start - whole[0].start), end=each.end - whole[0].start)
        for row in sorted(ranges, key=_place)
        for each in joined(ranges[row], (whole[0].end - whole[0].start) * _FINEST)
        if each.end > whole[0].start and step_in(each.kind) is None
    ]
    kinds = [Curve(kind, (), (), colour) for kind, colour in _COLOURS.items() if any(s.kind == kind for s in spans)]
    spec = timeline(spans, kinds, Axis("seconds", low=0.0))
    return Chart("timeline", f"Time line of step {max(steps)}", _CAPTION, spec)


def _behind(directory: Path, step: int, whole: Span) -> dict[str, list[Span]]:
    """Rows of tools and scorers. Later steps' trajectories may be sampled meanwhile, so their dumps are read as well.

    whole: the step, in seconds since the same epoch.
    """
    rows: dict[str, list[Span]] = {"tools": [], "scoring": []}
    for path in (path for number, path in trajectory_files(directory).items() if number >= step):
        before = sum(map(len, rows.values()))
        try:
            for times in read_times(path):
                for row, kind, found in (("tools", _TOOLS, times.tools), ("scoring", "reward", times.scoring)):
                    within = ((start, end) for start, end in found if start < whole.end and end > whole.start)
                    rows[row] += [Span("", kind, start, min(end, whole.end)) for start, end in within]
        except DamagedFileError as error:
            log.warning("the time line is without what this dump has of tools and scorers: %s", error)
            continue
        if sum(map(len, rows.values())) == before:
            break
    return {row: spans for row, spans in rows.items() if spans}


def joined(spans: Iterable[Span], gap: float) -> list[Span]:
    """Spans of one row in their order; equal ones at most `gap` apart are one."""
    result: list[Span] = []
    for each in sorted(spans, key=lambda span: span.start):
        last = result[-1] if result else None
        if last is not None and last.kind == each.kind and each.start - last.end <= gap:
            result[-1] = replace(last, end=max(last.end, each.end))
        else:
            result.append(each)
    return result


def _place(row: str) -> tuple[int, int]:
    """Each kind by number."""
    kind, _, number = row.partition(" ")
    return _ROWS.index(kind), int(number or 0)


def _ranges(path: Path) -> Iterator[Span]:
    """The step and its phases, or the steps of an engine, in seconds since an epoch that all traces share."""
    try:
        trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        base = int(trace.get("baseTimeNanoseconds", 0)) / 1e9
        events = [each for each in trace["traceEvents"] if each.get("cat") == "user_annotation"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        log.warning("%s is left out of the time line: %s", path, error)
        return
    for event in events:
        if kind := _kind(event["name"]):
            start = base + event["ts"] / 1e6
            yield Span("", kind, start, start + event["dur"] / 1e6)


def _kind(name: str) -> str:
    """Of a range by its name; empty for what is not shown."""
    if name.startswith("execute_context_"):
        return _SAMPLES
    if name.startswith("time/"):
        phase = name.removeprefix("time/")
        return phase if phase in _COLOURS else _OTHER
    return name if name.startswith("step_") else ""
