"""The tables of `benchmarks.trl`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.kernels import report
from benchmarks.measured import quiet, spread
from benchmarks.trl_sizes import SIZES, Size

OURS, TRL = "ctpo-megatron", "TRL"

FIGURES = {
    "samples": "samples/s",
    "tokens": "trained tokens/s",
    "seconds": "seconds a step",
    "cpu_per_1000": "CPU-s per 1,000 trained tokens",
    "memory": "peak memory, MiB",
}
RATIOS = {
    "samples": "samples/s",
    "tokens": "trained tokens/s",
    "cpu_per_1000": "CPU-s per trained token",
    "memory": "peak memory",
}


def ratios(result: dict[str, Any], key: str) -> list[float]:
    """Of ours over TRL's, round by round."""
    pairs = zip(result["found"][OURS], result["found"][TRL], strict=True)
    return [ours[key] / theirs[key] for ours, theirs in pairs]


def sides(result: dict[str, Any]) -> str:
    """A row for each figure."""
    rows = []
    for key, name in FIGURES.items():
        digits = 0 if key in ("memory", "tokens") else 2
        rows.append((name, *(spread([each[key] for each in result["found"][side]], digits) for side in (OURS, TRL))))
    rows.append(("run with", *(result["ways"][side] for side in (OURS, TRL))))
    return report.markdown(("median (least to most)", OURS, TRL), rows)


def compared(result: dict[str, Any], size: Size) -> str:
    """The ratios, and the goals among them."""
    rows = []
    for key, name in RATIOS.items():
        found, goal = ratios(result, key), size.goals.get(key)
        middle = statistics.median(found)
        if goal is None:
            said = "-"
        elif key == "samples":
            said = f"at least {goal}: {'met' if middle >= goal else 'missed'}"
        else:
            said = f"at most {goal}: {'met' if middle <= goal else 'missed'}"
        rows.append((name, spread(found), said))
    return report.markdown((f"{OURS} / {TRL}", "median (least to most)", "goal"), rows)


def parts(result: dict[str, Any]) -> str:
    """Median CPU-seconds of a step by part of the process tree."""
    rows = []
    for side in (OURS, TRL):
        found = result["found"][side]
        for part in sorted({part for each in found for part in each["parts"]}):
            used = statistics.median(each["parts"].get(part, 0.0) / each["steps"] for each in found)
            memory = statistics.median(each["memory_of"].get(part, 0.0) for each in found)
            rows.append((side, part, f"{used:.2f}", f"{memory:.0f}" if memory else "-"))
        rows.append((side, "all", f"{statistics.median(each['cpu'] / each['steps'] for each in found):.2f}", "-"))
    return report.markdown(("side", "part", "CPU-s a step", "MiB at the peak"), rows)


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    size = SIZES[result["size"]]
    every = [each for side in (OURS, TRL) for each in result["found"][side]]
    tried = "; ".join(
        f"{side}: " + ", ".join(f"{way} {rate:.2f}" for way, rate in found.items())
        for side, found in result["tried"].items()
        if found
    )
    rewards = ", ".join(
        f"{side} {spread([r for each in result['found'][side] for r in each['rewards']])}" for side in (OURS, TRL)
    )
    packages = dict(line.split("==", 1) for line in result["trl_packages"] if "==" in line)
    theirs = ", ".join(f"{name} {packages[name]}" for name in ("trl", "transformers", "torch", "accelerate"))
    return "\n\n".join(
        [
            f"# Training steps beside TRL's: {size.name}",
            f"{size.about} {len(result['found'][OURS])} rounds in alternating order of {size.steps} counted steps each"
            f"{f' after {size.warm}' if size.warm else ''}. What is the same and what is not: benchmarks/README.md.",
            sides(result),
            compared(result, size),
            parts(result),
            f"Samples/s of one shorter run each: {tried or 'none was made'}. Mean rewards of the steps: {rewards}.",
            f"{report.describe(result['environment'])} TRL's environment: {theirs}. {quiet(every)}",
        ]
    )
