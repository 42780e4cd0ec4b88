"""Our sandbox against a fresh interpreter per request, on this machine, in turns: runs/s, latency, CPU per run.

    python -m benchmarks.sandbox [--seconds 4] [--rounds 3] [--out benchmarks/results]
    python -m benchmarks.sandbox --levels     what each level of isolation costs

Both servers stay up; each snippet and concurrency is measured on one and then on the other, `--rounds` times; medians
count. CPU is that of the server's whole process tree per run. Any other server that speaks the contract can be the
other side: --other URL (its CPU is not counted then).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from ctpo_sandbox import Limits, SandboxClient, SandboxStartError, start_server
from ctpo_sandbox.records import LEVELS

ROOT = Path(__file__).resolve().parents[1]
GOALS = {("numpy", 8): 15.0, ("integrate", 8): 25.0, ("solve", 8): 25.0, ("print", 8): 8.0}
CROWD = 128
P99_GOAL = 3.0  # of `print`, in units of a crowd's fair share of the time: requests in flight / runs per second
START_S = 30.0
SNIPPETS = {
    "print": "print(1 + 1)",
    "numpy": "import numpy as np\nprint(np.linalg.norm(np.arange(100.0)))",
    "integrate": "import sympy\nx = sympy.symbols('x')\nprint(sympy.integrate(x**3 + 2 * x, x))",
    "heavy": "import sympy\nx = sympy.symbols('x')\nprint(sympy.integrate(x**2 * sympy.sin(x), x))",
    "solve": "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 7 * x + 10, x))",
}
HEAD = (
    "| snippet | concurrency | ours, runs/s | other, runs/s | ratio (range) | goal | ours, CPU-ms | other, CPU-ms "
    "| ours, p50 / p99 ms | other, p50 / p99 ms |\n|---|---|---|---|---|---|---|---|---|---|"
)


@contextlib.contextmanager
def baseline(isolation: str) -> Iterator[tuple[str, int]]:
    """Address and process id of the other server with four processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "benchmarks.sandbox_baseline:app",
        "--port",
        str(port),
        "--loop",
        "asyncio",
    ]
    environment = {**os.environ, "BASELINE_ISOLATION": isolation, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--workers", "4", "--log-level", "warning"], env=environment, cwd=ROOT)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == httpx.codes.OK:
                    break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the baseline server did not answer within {START_S:g} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(START_S)


@dataclass(frozen=True)
class Measurement:
    """One snippet at one concurrency. Latencies as seen by the client, including queueing, in milliseconds."""

    runs: int
    per_second: float
    p50_ms: float
    p99_ms: float


async def measure(url: str, snippet: str, concurrency: int, seconds: float) -> Measurement:
    """Keep `concurrency` requests in flight for `seconds`. Raises RuntimeError for a run that does not succeed."""
    client = SandboxClient(url, max_concurrency=concurrency, request_timeout_s=300)
    code, latencies = SNIPPETS[snippet], list[float]()
    await client.run(code, run_timeout_s=20)  # connections and the worker's first run
    end = time.monotonic() + seconds

    async def one_after_another() -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            result = await client.run(code, run_timeout_s=20)
            latencies.append(time.monotonic() - started)
            if result.status != "success":
                raise RuntimeError(f"{url}: {snippet} ended with {result.status}: {result.stderr[-500:]}")

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    elapsed = time.monotonic() - started
    await client.aclose()
    latencies.sort()
    p50, p99 = (1000 * latencies[min(len(latencies) - 1, int(q * len(latencies)))] for q in (0.5, 0.99))
    return Measurement(len(latencies), len(latencies) / elapsed, p50, p99)


def tree_cpu_s(pid: int | None) -> float:
    """CPU seconds of a process tree, ended and reaped children included."""
    if pid is None:
        return float("nan")
    root = psutil.Process(pid)
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def one(url: str, pid: int | None, snippet: str, concurrency: int, seconds: float) -> dict[str, float]:
    """One measurement of one side."""
    before = tree_cpu_s(pid)
    found = asyncio.run(measure(url, snippet, concurrency, seconds))
    cpu_ms = 1000 * (tree_cpu_s(pid) - before) / found.runs
    return {"runs_per_s": found.per_second, "p50_ms": found.p50_ms, "p99_ms": found.p99_ms, "cpu_ms": cpu_ms}


def compare(sides: dict[str, tuple[str, int | None]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per snippet and concurrency: medians of both sides and the ratio of runs per second."""
    rows = []
    for snippet in SNIPPETS:
        for concurrency in arguments.concurrency:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for _ in range(arguments.rounds):
                for name, (url, pid) in sides.items():
                    found[name].append(one(url, pid, snippet, concurrency, arguments.seconds))
            medians = {
                name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                for name, runs in found.items()
            }
            ratios = [a["runs_per_s"] / b["runs_per_s"] for a, b in zip(*found.values(), strict=True)]
            row = {"snippet": snippet, "concurrency": concurrency, **medians, "ratio": statistics.median(ratios)}
            row |= {"ratio_range": [min(ratios), max(ratios)], "goal": GOALS.get((snippet, concurrency))}
            rows.append(row)
            print(as_row(row), flush=True)
    return rows


def compare_levels(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """CPU of the server's process tree per `print` at each level that this machine offers; all servers up, in turns."""
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {}
        for level in LEVELS:
            options = {"slots": 2, "limits": Limits(run_timeout_s=30), "start_timeout_s": 60}
            try:
                server = start_server(**options, log_path=folder / level, level=level, require="none")
            except SandboxStartError as error:
                print(f"not offered here: {level}: {error}")
                continue
            servers[level] = stack.enter_context(server)
        for _ in range(arguments.rounds):
            for level, server in servers.items():
                cpu_ms = one(server.url, server.process.pid, "print", 8, arguments.seconds)["cpu_ms"]
                found.setdefault(level, []).append(cpu_ms)
    base = statistics.median(found["none"])
    rows = [{"level": level, "cpu_ms": statistics.median(runs)} for level, runs in found.items()]
    rows = [row | {"overhead_ms": row["cpu_ms"] - base} for row in rows]
    print("| level | CPU-ms a run | above none |\n|---|---|---|")
    for row in rows:
        print(f"| {row['level']} | {row['cpu_ms']:.2f} | {row['overhead_ms']:+.2f} |")
    return rows


def as_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    ours, other = row["ours"], row["other"]
    goal = "" if row["goal"] is None else f"{row['goal']:g}x {'met' if row['ratio'] >= row['goal'] else 'NOT MET'}"
    low, high = row["ratio_range"]
    return (
        f"| {row['snippet']} | {row['concurrency']} | {ours['runs_per_s']:.0f} | {other['runs_per_s']:.1f} "
        f"| {row['ratio']:.1f} ({low:.1f} to {high:.1f}) | {goal} | {ours['cpu_ms']:.1f} | {other['cpu_ms']:.1f} "
        f"| {ours['p50_ms']:.0f} / {ours['p99_ms']:.0f} | {other['p50_ms']:.0f} / {other['p99_ms']:.0f} |"
    )


def setting_of(arguments: argparse.Namespace, ours: str, other: str) -> dict[str, Any]:
    """What was measured, on what."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "ours": ours,
        "other": other,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write(folder: Path, setting: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """sandbox.json and sandbox.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sandbox.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    lines = ["# Our sandbox against a fresh interpreter per request", "", HEAD, *map(as_row, rows), ""]
    lines += [f"- {key}: {value}" for key, value in setting.items()]
    (folder / "sandbox.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--other", help="URL of another server; default: a fresh interpreter per request")
    parser.add_argument("--level", help="our level of isolation; default: the strongest there is")
    parser.add_argument("--levels", action="store_true", help="compare our levels of isolation instead")
    parser.add_argument("--out", type=Path, help="folder for sandbox.json and sandbox.md")
    arguments = parser.parse_args()
    if arguments.levels:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare_levels(arguments, Path(folder))
        if arguments.out:
            setting = setting_of(arguments, "print at concurrency 8, 2 slots", "")
            text = json.dumps({"setting": setting, "rows": rows}, indent=1)
            (arguments.out / "sandbox-levels.json").write_text(text + "\n")
        return 0
    isolation = "bwrap" if shutil.which("bwrap") else "none"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = {"slots": len(os.sched_getaffinity(0)) + 1, "limits": Limits(run_timeout_s=30)}
        ours = stack.enter_context(
            start_server(**options, start_timeout_s=60, log_path=folder / "log", level=arguments.level, require="none")
        )
        other = (arguments.other, None) if arguments.other else stack.enter_context(baseline(isolation))
        print(HEAD)
        rows = compare({"ours": (ours.url, ours.process.pid), "other": other}, arguments)
        level = ours.health["level"]
        crowd = asyncio.run(measure(ours.url, "print", CROWD, 2 * arguments.seconds))
    shares = crowd.p99_ms / (1000 * CROWD / crowd.per_second)
    tail = f"p99 {crowd.p99_ms:.0f} ms at {crowd.per_second:.0f} runs/s, {shares:.1f} fair shares"
    tail += f", goal {P99_GOAL:g}: {'met' if shares <= P99_GOAL else 'NOT MET'}"
    print(f"\nprint at concurrency {CROWD}: {tail}")
    if arguments.out:
        text = arguments.other or f"fresh interpreter per request, isolation: {isolation}, 4 processes"
        setting = setting_of(arguments, f"level {level}, {options['slots']} slots", text)
        write(arguments.out, setting | {f"print at concurrency {CROWD}": tail}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
