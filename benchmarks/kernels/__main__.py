"""`python -m benchmarks.kernels [--suite A B C D] [--device cuda|cpu] [--quick] [--out DIR] [--deadline SECONDS]`.

Ceilings first, then per suite a correctness gate and the timings, then the goals. Exit status 1 if a gate does not hold
or a side of ours fails; a missed goal is in the table. --device cpu --quick runs the plain torch backend on tiny
shapes: that shows that the code works and measures no goal but the numerics.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import ceilings, goals, report, roofline, suite_head, suite_logits, suite_loss, suite_numerics
from benchmarks.kernels.measure import Session

SUITES = {"A": suite_loss, "B": suite_logits, "C": suite_head, "D": suite_numerics}
TITLES = {
    "A": "loss of given log-probs",
    "B": "log-probs of given logits",
    "C": "head: output layer to gradients",
    "D": "numerics",
}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--out", type=Path, help="folder for kernels-DEVICE.json, .md and .png")
    parser.add_argument("--deadline", type=float, default=520, help="seconds after which nothing new is started")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is at hand; --device cpu --quick shows that the code runs")

    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu needs --quick: the full shapes are for a GPU")

    session = Session(options.device, quick=options.quick, deadline_s=options.deadline)
    broken: list[str] = []
    ceilings.run(session)
    for letter in options.suite:
        print(f"suite {letter}: {TITLES[letter]}, {session.seconds_left():.0f} s left", file=sys.stderr, flush=True)
        try:
            SUITES[letter].run(session)
        except Exception as error:
            # What the other suites found is worth its time: report it, and fail at the end.
            broken.append(f"suite {letter}: {type(error).__name__}: {error}")
            traceback.print_exc()
        session.release()
        write(session, options, broken)
    print(text(session, broken, report.environment(options.device)))
    failed = [record for record in session.records if "failed" in record]
    for record in failed:
        print(record["traceback"], file=sys.stderr)
    return 1 if broken or failed else 0


def write(session: Session, options: argparse.Namespace, broken: list[str]) -> None:
    """Results so far, after every suite: a machine may be taken away."""
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    environment = report.environment(options.device)
    name = f"kernels-{options.device}" + ("-quick" if options.quick else "")
    found = [
        dict(zip(("goal", "demand", "stretch", "measured", "verdict"), g.row(), strict=True))
        for g in goals.goals(session)
    ]
    content: dict[str, Any] = {"environment": environment, "ceilings": session.ceilings, "broken": broken}
    content |= {"goals": found, "records": session.records}
    (options.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    note = roofline.draw(session, options.out / f"{name}.png", environment["device"])
    body = text(session, broken, environment)
    (options.out / f"{name}.md").write_text(body + (f"\n\nNo picture: {note}\n" if note else "\n"))


def text(session: Session, broken: list[str], environment: dict[str, Any]) -> str:
    """Everything as markdown, the goals first."""
    copy, matmul = session.ceilings["copy_bytes_per_s"], session.ceilings["matmul_flops_per_s"]
    parts = [
        "# Kernels: goals and measurements",
        report.describe(environment),
        f"Ceilings of this run: copy {copy / 1e9:.0f} GB/s, matrix product {matmul / 1e12:.3g} TFLOP/s.",
    ]
    parts += [f"BROKEN: {line}" for line in broken]
    header = ("goal", "demand", "stretch", "measured", "verdict")
    parts.append(report.markdown(header, [goal.row() for goal in goals.goals(session)]))
    for letter, title in TITLES.items():
        rows = [_row(record, copy, matmul) for record in session.records if record["suite"] == letter]
        if rows and letter != "D":
            columns = ("case", "side", "ms", "wall ms", "graph us", "GB/s (of copy)", "TFLOP/s (of roof)")
            columns += ("peak MiB", "launches", "syncs", "note")
            parts += [f"## {letter}: {title}", report.markdown(columns, rows)]
        elif rows:
            cells = [
                (r["case"], r["side"], r.get("value"), r.get("not_run", ""))
                for r in session.records
                if r["suite"] == "D"
            ]
            parts += [f"## D: {title}", report.markdown(("question", "side", "answer", "note"), cells)]
    return "\n\n".join(parts)


def _row(record: dict[str, Any], copy: float, matmul: float) -> tuple[Any, ...]:
    note = "; ".join(f"{key.replace('_', ' ')}: {record[key]}" for key in ("not_run", "failed") if key in record)
    if "seconds" not in record:
        return (record["case"], record["side"], *[None] * 8, note)
    seconds = record.get("graph_s", record["seconds"])
    low, high = sorted(record["medians"])
    if high > 1.1 * low:
        note = f"two passes differ: {1e3 * low:.3g} and {1e3 * high:.3g} ms"

    def rate(quantity: str, ceiling: float, unit: float) -> str | None:
        if not record.get(quantity):
            return None
        found = record[quantity] / seconds
        return f"{found / unit:.3g} ({found / ceiling:.0%})"

    return (
        record["case"],
        record["side"],
        1e3 * record["seconds"],
        1e3 * record["wall_s"],
        1e6 * record["graph_s"] if "graph_s" in record else None,
        rate("bytes", copy, 1e9),
        rate("flops", matmul, 1e12),
        record["peak_bytes"] / 2**20 if "peak_bytes" in record else None,
        record.get("launches"),
        record.get("syncs"),
        note,
    )


if __name__ == "__main__":
    sys.exit(main())
