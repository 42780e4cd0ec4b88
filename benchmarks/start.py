"""The start of `ctpo train` next to TRL's, from the call to the first RL step: seconds, CPU-seconds and memory.

    PYTHONPATH=.:answers:kernels:sandbox:launchers python -m benchmarks.start [--rounds 3] [--cache FOLDER]
        [--out benchmarks/results] [--alone]

Both sides train the quickstart's model after its supervised stage for one step, in turns, the order alternating. The
first step begins when the metrics of a side have their line of step 0, and ends with that of step 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import measured, runs
from benchmarks.kernels import report
from benchmarks.trl import trl_environment, versions, watch_ours, watch_trl
from benchmarks.trl_sizes import QUICKSTART, Way, start_of
from benchmarks.trl_text import OURS, TRL

WAY, STEPS = Way(1), 1
ROWS = {
    "wall": ("seconds until the first step", 1),
    "cpu": ("CPU-seconds until then", 1),
    "wall_of_step": ("seconds until its end", 1),
    "cpu_of_step": ("CPU-seconds until then", 1),
    "memory": ("peak memory, MiB", 0),
}
"""Key of a figure -> its name and decimals."""


def play(watch: Callable[..., measured.Observed], start: tuple[Path, Path]) -> dict[str, Any]:
    """Run a side once; all that it started has ended afterwards.

    Returns what its start took: seconds, CPU-seconds by part, and the most memory (PSS, MiB) up to the end of the step.
    """
    busy, before = measured.machine_busy(), measured.cpu_seconds(measured.tree(psutil.Process()))
    with tempfile.TemporaryDirectory() as name:
        try:
            observed = watch(QUICKSTART, start, WAY, STEPS, Path(name))
        finally:
            measured.end_all()
    # Without what zombies of earlier runs have used.
    first, step = ({part: each.cpu[part] - before.get(part, 0.0) for part in each.cpu} for each in observed.moments[:2])
    cpu = sum(first.values())
    return {
        "wall": observed.moments[0].wall,
        "cpu": cpu,
        "parts": first,
        "wall_of_step": observed.moments[1].wall,
        "cpu_of_step": sum(step.values()),
        "others_cpu": observed.moments[0].machine - busy - cpu,
        "memory": observed.peak_mib,
        "memory_of": observed.peak_of,
    }


def measure(sides: Mapping[str, Callable[..., measured.Observed]], start: tuple[Path, Path], rounds: int) -> Any:
    """Run the sides in turns; returns the figures of each."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            found[side].append(play(sides[side], start))
            one = found[side][-1]
            print(f"{side}: {one['wall']:.1f} s, {one['cpu']:.1f} CPU-s, {one['memory']:.0f} MiB", flush=True)
    return {"found": found, "environment": report.environment("cpu") | {"versions": versions()}}


def text(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    found = result["found"]
    rows = []
    for key, (name, digits) in ROWS.items():
        row = [measured.spread([each[key] for each in side], digits) for side in found.values()]
        if TRL in found:
            pairs = zip(found[OURS], found[TRL], strict=True)
            row.append(measured.spread([ours[key] / theirs[key] for ours, theirs in pairs]))
        rows.append((name, *row))
    header = ("median (least to most)", *found, *([f"{OURS} / {TRL}"] if TRL in found else []))
    every = [each for side in found.values() for each in side]
    return "\n\n".join(
        [
            "# From the call to the first RL step",
            f"The quickstart's model after its supervised stage, {len(found[OURS])} rounds in alternating order, one "
            "thread each for trainer and engine. Memory: the most at once (PSS) up to the end of the first step.",
            report.markdown(header, rows),
            report.markdown(("side", "part", "CPU-seconds", "MiB at the peak"), _parts(found)),
            f"{report.describe(result['environment'])} {measured.quiet(every)}",
        ]
    )


def _parts(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, str, str, str]]:
    rows = []
    for side, runs_of_side in found.items():
        for part in sorted({part for each in runs_of_side for part in each["memory_of"]}):
            used = statistics.median(each["parts"].get(part, 0.0) for each in runs_of_side)
            memory = statistics.median(each["memory_of"].get(part, 0.0) for each in runs_of_side)
            rows.append((side, part, f"{used:.1f}", f"{memory:.0f}"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the page, and store it where asked; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--cache", type=Path, default=runs.CACHE, help="for TRL's environment and the start weights")
    parser.add_argument("--out", type=Path, help="folder for start.json and start.md")
    options = parser.parse_args(argv)
    measured.adopt_orphans()
    sides: dict[str, Callable[..., measured.Observed]] = {OURS: watch_ours}
    if not options.alone:
        sides[TRL] = partial(watch_trl, python=trl_environment(options.cache / "trl"))
    result = measure(sides, start_of(QUICKSTART, options.cache), options.rounds)
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "start.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "start.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
