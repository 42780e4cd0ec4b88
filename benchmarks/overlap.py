"""Sampling ahead of the trainer against sampling and training in turn: seconds a step of the quickstart's training.

    PYTHONPATH=.:answers:kernels:sandbox:launchers python -m benchmarks.overlap [--latency none slow] [--rounds 3]
        [--cache FOLDER] [--out benchmarks/results]

Synchronous is `rollout.max_staleness: 0`. Asynchronous is 1 with `rollout.partial: continue`. Both start from the
quickstart's model after its supervised stage and are given the same prompts, and both weigh tokens by what the engine
reported (`objective.anchor: behaviour`), so that they do the same passes. `slow` puts a tool of the user's own in the
place of `python`: each call first sleeps for a log-normal time between 0.5 and 5 s (`benchmarks/slow_tool.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import measured, runs
from benchmarks.kernels import report
from benchmarks.measured import spread

SYNCHRONOUS = "synchronous"
SIDES = {
    SYNCHRONOUS: ("rollout.max_staleness=0",),
    "asynchronous": ("rollout.max_staleness=1", "rollout.partial=continue"),
    "two steps ahead": ("rollout.max_staleness=2", "rollout.partial=continue"),
}
PLAYED = {"none": (SYNCHRONOUS, "asynchronous"), "slow": tuple(SIDES)}
"""By latency of the tool."""
GOALS = {"none": 0.9, "slow": 2.0}
"""Of the CPU-bound limit; speed-up."""
WARM, TAIL = 2, 2
"""Steps that are not counted: the first have nothing sampled ahead, during the last ones nothing more is sampled."""
COUNTED = {"none": 6, "slow": 4}
DEADLINE_S = 900.0

Figures = dict[str, Any]


def play(side: str, latency: str, threads: int, start: tuple[Path, Path]) -> Figures:
    """One run; all that it started has ended afterwards."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        settings = [
            *runs.RL_ONLY,
            *SIDES[side],
            "objective.anchor=behaviour",
            f"run.root={folder}",
            f"run.name={latency}",
            f"run.steps={WARM + COUNTED[latency] + TAIL}",
            f"model.path={start[0]}",
            f'data.train=["{start[1]}"]',
            f"policy.threads={threads}",
            f"rollout.engine.threads={threads}",
        ]
        if latency == "slow":
            url = stack.enter_context(runs.sandbox(folder))
            tool = f'{{name: "benchmarks.slow_tool:SlowPython", arguments: {{url: "{url}"}}}}'
            settings += [f"rollout.tools=[{tool}]", f'extensions.path=["{runs.ROOT}"]']
        observed = measured.watch(
            runs.train(*settings),
            folder / latency / "metrics.jsonl",
            folder / "log",
            environment=runs.environment(),
            deadline_s=DEADLINE_S,
            memory=False,
        )
    measured.end_all()
    found = figures(observed, WARM + COUNTED[latency])
    print(f"{latency}, {side}, threads {threads}: {found['seconds']:.2f} s a step", flush=True)
    return found


def figures(observed: measured.Observed, last: int) -> Figures:
    """Of the counted steps of a run, up to `last`. cpu_bound: seconds that all cores need at least for a step."""
    found = measured.between(observed, WARM, last)
    lines = [line for line in observed.lines if WARM < line["step"] <= last]
    bound = found["cpu"] / found["steps"] / (os.cpu_count() or 1)
    seconds = found["wall"] / found["steps"]
    return found | {
        "seconds": seconds,
        "cpu_bound": bound,
        "reached": bound / seconds,
        "cpu_seconds": found["cpu"] / found["steps"],
        "rewards": [line["reward/mean"] for line in lines],
        "times": {key: statistics.fmean(line[key] for line in lines) for key in lines[0] if key.startswith("time/")},
        "stale": statistics.fmean(line.get("rollout/staleness_mean", 0.0) for line in lines),
    }


def compare(latency: str, rounds: int, threads: int, cache: Path) -> Iterator[dict[str, Any]]:
    """All sides, the order alternating: the result after each round."""
    start = runs.start_weights(cache)
    found: dict[str, list[Figures]] = {side: [] for side in PLAYED[latency]}
    about = {"latency": latency, "found": found, "start_weights": runs.digest(start[0])}
    for number in range(rounds):
        for side in list(found)[:: -1 if number % 2 else 1]:
            found[side].append(play(side, latency, threads, start))
        yield about | {"environment": report.environment("cpu", threads)}


def speed_ups(result: dict[str, Any], side: str) -> list[float]:
    """Of a side over the synchronous one, round by round."""
    pairs = zip(result["found"][SYNCHRONOUS], result["found"][side], strict=True)
    return [base["seconds"] / ahead["seconds"] for base, ahead in pairs]


def table(result: dict[str, Any]) -> str:
    """A row for each side."""
    rows = []
    for side, found in result["found"].items():
        columns = [[each[key] for each in found] for key in ("seconds", "cpu_seconds", "cpu_bound")]
        reached = spread([100 * each["reached"] for each in found], 0)
        rows.append((side, *map(spread, columns), reached, spread(speed_ups(result, side))))
    header = ("median (least to most)", "seconds a step", "CPU-s a step", "CPU-s / cores", "% reached", "speed-up")
    return report.markdown(header, rows)


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    latency, found = result["latency"], result["found"]
    if latency == "none":
        value = statistics.median(each["reached"] for each in found["asynchronous"])
        goal = f"at least {GOALS[latency]:.0%} of the CPU-bound limit of its own run"
        said, tool = f"{value:.0%}", "The tool answers at once."
    else:
        value = statistics.median(speed_ups(result, "asynchronous"))
        goal, said = f"at least {GOALS[latency]:g} times as fast", f"{value:.2f}"
        tool = "Each call of the tool first sleeps for a log-normal time, 0.5 to 5 s."
    rewards = "; ".join(f"{side} {spread([r for e in each for r in e['rewards']])}" for side, each in found.items())
    every = [run for each in found.values() for run in each]
    last = WARM + COUNTED[latency]
    rounds = len(found[SYNCHRONOUS])
    return "\n\n".join(
        [
            f"# Sampling ahead of the trainer, latency of the tool: {latency}",
            f"The quickstart's training steps from its start weights, 32 prompts x 8 samples. {tool} {rounds} rounds "
            f"in alternating order, steps {WARM + 1} to {last} of {last + TAIL}.",
            table(result),
            f"Goal for `asynchronous`: {goal}: {said}, {'met' if value >= GOALS[latency] else 'missed'}. Mean rewards "
            f"of the steps: {rewards}.",
            f"{report.describe(result['environment'])} {measured.quiet(every)}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit status 0 also when a goal is missed: the text says it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--latency", nargs="+", choices=list(PLAYED), default=list(PLAYED))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the trainer and of the engine, each")
    parser.add_argument("--cache", type=Path, default=runs.CACHE, help="for the start weights")
    parser.add_argument("--out", type=Path, help="folder for overlap-LATENCY.json and overlap-LATENCY.md")
    options = parser.parse_args(argv)
    measured.adopt_orphans()
    for latency in options.latency:
        for result in compare(latency, options.rounds, options.threads, options.cache):
            print(text(result))
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"overlap-{latency}.json").write_text(json.dumps(result, indent=1) + "\n")
                (options.out / f"overlap-{latency}.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
