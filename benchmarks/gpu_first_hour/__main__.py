"""`make gpu-first-hour`, or `python -m benchmarks.gpu_first_hour [--device cuda|cpu] [--only STAGE ...] [--again]`.

Runs the stages of `stages.py` one after another, each in a process group of its own with a limit of its own. After
each stage a JSON line is added to DEVICE.jsonl and the page DEVICE.md is written anew, so nothing is lost when the
machine is taken away or Ctrl-C is pressed. The next call goes on with the stages that have not passed at this commit.

Exit status 1 if a stage failed, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_first_hour.report import page
from benchmarks.gpu_first_hour.run import Interrupt, Record, run_stage
from benchmarks.gpu_first_hour.stages import Machine, Stage, stages
from benchmarks.kernels import report

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _arguments(argv)
    environment = report.environment(options.device)
    tag = re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-")
    work = (options.work / tag).resolve()
    for folder in (work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    planned = stages(Machine(options.device, torch.cuda.device_count(), tag), work)
    _refuse_unknown(options.only, planned)
    results = options.out / f"{tag}.jsonl"
    records = _read(results)
    interrupted = Interrupt()
    signal.signal(signal.SIGINT, interrupted.on_signal)
    for stage in planned:
        if interrupted.seen or (options.only and stage.name not in options.only):
            continue
        if not options.again and _is_done(records.get(stage.name), environment["commit"]):
            print(f"{stage.name}: passed at this commit", flush=True)
            continue
        print(f"{stage.name}: {stage.purpose} (at most {stage.limit_s:g} s)", flush=True)
        record = run_stage(stage, work / f"{stage.name}.log", ROOT, environment["commit"], interrupted)
        _add(results, record)
        records = _read(results)
        (options.out / f"{tag}.md").write_text(page(planned, records, environment))
        print(f"{stage.name}: {record.status} {record.detail} after {record.seconds:g} s", flush=True)
    print(f"{options.out / tag}.md")
    chosen = [records[s.name]["status"] for s in planned if s.name in records and s.name in (options.only or records)]
    return 130 if interrupted.seen else int(any(status not in ("passed", "skipped") for status in chosen))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour", description=__doc__)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny shapes, to see that it runs"
    )
    parser.add_argument("--only", nargs="+", metavar="STAGE", default=[], help="these stages")
    parser.add_argument("--again", action="store_true", help="also stages that passed at this commit")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="results")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu_first_hour", help="logs and runs")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is at hand; --device cpu shows that the stages run")
    return options


def _refuse_unknown(names: list[str], planned: list[Stage]) -> None:
    known = [stage.name for stage in planned]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--only: unknown stage {', '.join(unknown)}; known: {', '.join(known)}")


def _is_done(record: dict[str, Any] | None, commit: str) -> bool:
    """A tree with changes ("+") may differ from the one that passed."""
    return (
        record is not None
        and record["status"] == "passed"
        and record["commit"] == commit != "unknown"
        and (not commit.endswith("+"))
    )


def _read(results: Path) -> dict[str, dict[str, Any]]:
    """The last record of each stage. A line that was cut off by a lost machine is passed over."""
    records: dict[str, dict[str, Any]] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            print(f"{results}: passed over a line that is not JSON: {line[:60]}", file=sys.stderr)
            continue
        records[record["stage"]] = record
    return records


def _add(results: Path, record: Record) -> None:
    text = results.read_text() if results.exists() else ""
    with results.open("a") as file:
        file.write(("\n" if text and not text.endswith("\n") else "") + record.line() + "\n")


if __name__ == "__main__":
    sys.exit(main())
