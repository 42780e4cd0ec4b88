"""The time line of one step, from the traces of `run.profile_steps`: what ranks and engines did at the same time."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctpo_megatron.base.run_paths import RunPaths, step_in, step_name
from ctpo_megatron.report.axes import Axis
from ctpo_megatron.report.charts import Chart, Curve, Span, timeline
from ctpo_megatron.report.metric_charts import PHASE_COLOURS

log = logging.getLogger(__name__)

LARGEST = 1 << 25
"""Bytes of a trace that is read, compressed: larger ones are for Perfetto alone."""
_CAPTION = (
    "Phases of each rank of the trainer, and when each engine samples; what is blank is not in the traces. Of an "
    "engine, only the first 256 steps are."
)
_FILE = re.compile(r"step_(\d{6,})_(rank|engine)_(\d+).*\.json\.gz")
_SAMPLES, _OTHER = "engine samples", "other"
_COLOURS = {**PHASE_COLOURS, _SAMPLES: "muted"}
_FINEST = 1 / 500
"""Share of the step below which a gap between equal spans is not drawn."""


def step_timeline(directory: Path) -> Chart | None:
    """The time line of the latest step that has a trace of rank 0; None without one, or where it is too large.

    Traces that are damaged are left out, with a line in the log.
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
    spans = [
        replace(each, row=row, start=max(0.0, each.start - whole[0].start), end=each.end - whole[0].start)
        for row in sorted(ranges, key=_place)
        for each in joined(ranges[row], (whole[0].end - whole[0].start) * _FINEST)
        if each.end > whole[0].start and step_in(each.kind) is None
    ]
    kinds = [Curve(kind, (), (), colour) for kind, colour in _COLOURS.items() if any(s.kind == kind for s in spans)]
    spec = timeline(spans, kinds, Axis("seconds", low=0.0))
    return Chart("timeline", f"Time line of step {max(steps)}", _CAPTION, spec)


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


def _place(row: str) -> tuple[bool, int]:
    """Ranks first, each kind by number."""
    kind, number = row.split()
    return kind != "rank", int(number)


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
