"""`make gpu-first-hour`, or `python -m benchmarks.gpu_first_hour [--device cuda|cpu] [--only STAGE ...] ...`.

Runs the stages of `stages.py` one after another, each in a process group of its own with a limit of its own. After
each stage its record is printed as one line of JSON and added to DEVICE.jsonl, and the page DEVICE.md is rewritten,
so nothing is lost when the machine is taken away or Ctrl-C is pressed. The next call continues with the stages that
have not passed with these sources.

Exit status 1 if a stage failed, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_first_hour import bundle
from benchmarks.gpu_first_hour.report import page, shown
from benchmarks.gpu_first_hour.run import Interrupt, Record, run_stage
from benchmarks.gpu_first_hour.stages import Machine, Stage, stages
from benchmarks.kernels import report

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ctpo_megatron", "kernels", "sandbox", "launchers", "benchmarks", "configs")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    began = time.monotonic()
    options = _arguments(argv)
    site = _unpacked(options)
    environment = report.environment(options.device)
    commit = _sources(environment["commit"])
    tag = re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-")
    work = (options.work / tag).resolve()
    for folder in (work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    machine = Machine(options.device, torch.cuda.device_count(), tag, bundle.model(site), tuple(options.set))
    planned = stages(machine, work)
    _refuse_unknown(options.only, planned)
    results = options.out / f"{tag}.jsonl"
    records, statuses = _read(results), []
    interrupted = Interrupt()
    signal.signal(signal.SIGINT, interrupted.on_signal)
    for stage in planned:
        if interrupted.seen or (options.only and stage.name not in options.only):
            continue
        if not options.again and _is_done(records.get(stage.name), commit):
            print(f"{stage.name}: passed at this commit", flush=True)
            continue
        left_s = options.budget_s - (time.monotonic() - began)
        print(f"{stage.name}: {stage.purpose} (at most {min(stage.limit_s, max(0.0, left_s)):.3g} s)", flush=True)
        log = work / f"{stage.name}.log"
        record = run_stage(stage, log, ROOT, commit, interrupted, left_s=left_s, site=site)
        statuses.append(record.status)
        _add(results, record)
        records = _read(results)
        (options.out / f"{tag}.md").write_text(page(planned, records, environment, judged=options.device == "cuda"))
        print(replace(record, figures=shown(stage.name, record.figures) or None).line(), flush=True)
    print(f"{options.out / tag}.md")
    return 130 if interrupted.seen else int(any(status not in ("passed", "skipped") for status in statuses))


def _unpacked(options: argparse.Namespace) -> Path | None:
    """Where the packages of the bundle are, for this process as well; None without a bundle."""
    if options.bundle is None:
        return None
    site: Path = (options.work / "site").resolve()
    try:
        bundle.unpack(options.bundle, site)
    except bundle.BundleError as error:
        sys.exit(f"--bundle: {error}")
    sys.path.append(str(site))
    return site


def _sources(commit: str) -> str:
    """The commit if the sources are its own, else with a digest of them: a copy of a checkout may have no history."""
    if commit != "unknown" and not commit.endswith("+"):
        return commit
    digest = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.*")):
        if file.suffix in (".py", ".yaml"):
            digest.update(file.read_bytes())
    return f"{commit}-{digest.hexdigest()[:12]}"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour", description=__doc__)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny shapes, to see that it runs"
    )
    parser.add_argument("--only", nargs="+", metavar="STAGE", default=[], help="these stages")
    parser.add_argument("--again", action="store_true", help="also stages that passed at this commit")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf, metavar="N", help="seconds for all; what does not fit is skipped"
    )
    parser.add_argument("--set", nargs="+", metavar="KEY=VALUE", default=[], help="overrides of stages with an engine")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="packages for a machine without network: gpu_bundle")
    parser.add_argument("--out", type=Path, help="results; default: benchmarks/results/gpu, of a CPU the folder below")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu_first_hour", help="logs and runs")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is at hand; --device cpu shows that the stages run")
    if options.out is None:
        options.out = ROOT / "benchmarks" / "results" / "gpu" if options.device == "cuda" else options.work
    return options


def _refuse_unknown(names: list[str], planned: list[Stage]) -> None:
    known = [stage.name for stage in planned]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--only: unknown stage {', '.join(unknown)}; known: {', '.join(known)}")


def _is_done(record: dict[str, Any] | None, commit: str) -> bool:
    return record is not None and record["status"] == "passed" and record["commit"] == commit


def _read(results: Path) -> dict[str, dict[str, Any]]:
    """The last record of each stage; one that was skipped gives way to what is known of it from before.

    A line that was cut off by a lost machine is passed over.
    """
    records: dict[str, dict[str, Any]] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            print(f"{results}: passed over a line that is not JSON: {line[:60]}", file=sys.stderr)
            continue
        known = records.get(record["stage"], record)["status"]
        if record["status"] != "skipped" or known == "skipped":
            records[record["stage"]] = record
    return records


def _add(results: Path, record: Record) -> None:
    text = results.read_text() if results.exists() else ""
    with results.open("a") as file:
        file.write(("\n" if text and not text.endswith("\n") else "") + record.line() + "\n")


if __name__ == "__main__":
    sys.exit(main())
