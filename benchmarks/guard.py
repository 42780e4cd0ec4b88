"""Whether training has become slower: CPU-seconds of the quickstart's steps against a stored commit, in pairs.

    make bench-guard            or, with options, make bench-guard GUARD="--pairs 5 --steps 6 --against COMMIT"

Both sides run from the same environment, start weights and prompts, one after the other, in alternating order. The
rows are the phases of a step (`time/<phase>_cpu` of metrics.jsonl, the trainer's process alone), the parts of the
process tree, and the start of a run. Exit status 1: a row has lost more than 5 % in every pair. The commit stands in
guard.json; the repository's history is needed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measured, runs
from benchmarks.kernels import report

STORED = Path(__file__).with_suffix(".json")
STORED_SIDE, TREE = "stored commit", "working tree"
ALL = "all processes"
LOST = 1.05
"""Ratio of CPU-seconds above which a row is lost, in every pair."""
COUNTS = 0.02
"""Share of the step that a row needs for that: less is noise."""
WARM = 1
"""Steps that are not counted."""
DEADLINE_S = 900.0
PROBE = "import ctpo_megatron, ctpo_kernels, ctpo_sandbox; print(ctpo_megatron.__file__, ctpo_kernels.__file__)"

Pair = dict[str, dict[str, Any]]


def checked_out(commit: str, folder: Path) -> Path:
    """The files of a commit, in a folder of their own. Raises subprocess.CalledProcessError for one that is unknown."""
    done = subprocess.run(["git", "archive", commit], cwd=runs.ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environment(root: Path) -> dict[str, str]:
    """That of a side. The current directory is no place for imports: it would be the working tree for both."""
    return runs.environment(root) | {"PYTHONSAFEPATH": "1"}


def prepare(root: Path) -> None:
    """Compile a side's packages, as an installed one is. Raises RuntimeError unless it imports its own."""
    parts = ("ctpo_megatron", "answers", "kernels", "sandbox", "launchers")
    packages = [str(root / part) for part in parts if (root / part).exists()]  # an earlier commit may lack one
    subprocess.run([sys.executable, "-m", "compileall", "-q", *packages], check=True)
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=os.environ | environment(root), capture_output=True, text=True, check=True)
    if not all(Path(file).is_relative_to(root) for file in done.stdout.split()):
        raise RuntimeError(f"packages of {root} are imported from {done.stdout.strip()}")


def play(root: Path, steps: int, start: tuple[Path, Path]) -> dict[str, Any]:
    """One run of a side; all that it started has ended afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [
            *runs.rl_only(root),
            f"run.root={folder}",
            "run.name=guard",
            f"run.steps={WARM + steps}",
            f"model.path={start[0]}",
            f'data.train=["{start[1]}"]',
        ]
        observed = measured.watch(
            runs.train(*settings, root=root),
            folder / "guard" / "metrics.jsonl",
            folder / "log",
            environment=environment(root),
            deadline_s=DEADLINE_S,
            memory=False,
            directory=root,  # Ray's workers import from the driver's current directory first
        )
    measured.end_all()
    return figures(observed)


def figures(observed: measured.Observed) -> dict[str, Any]:
    """Of a run: CPU-seconds a step by row, rewards, and what the rest of the machine used."""
    found = measured.between(observed, WARM)
    lines = [line for line in observed.lines if line["step"] > WARM]
    phases = {key for line in lines for key in line if key.startswith("time/") and key.endswith("_cpu")}
    rows = {f"phase {key[5:-4]}": statistics.fmean(line.get(key, 0.0) for line in lines) for key in sorted(phases)}
    rows |= {f"part {part}": seconds / found["steps"] for part, seconds in sorted(found["parts"].items())}
    rows |= {ALL: found["cpu"] / found["steps"], "start of the run": sum(observed.moments[0].cpu.values())}
    rewards = [line["reward/mean"] for line in lines]
    return {"rows": rows, "rewards": rewards, "wall": found["wall"], "others_cpu": found["others_cpu"]}


def compare(against: str, pairs: int, steps: int, cache: Path) -> Iterator[dict[str, Any]]:
    """The result after each pair."""
    start = runs.start_weights(cache)
    found: list[Pair] = []
    with tempfile.TemporaryDirectory() as name:
        sides = {STORED_SIDE: checked_out(against, Path(name)), TREE: runs.ROOT}
        for root in sides.values():
            prepare(root)
        for number in range(pairs):
            order = list(sides)[:: -1 if number % 2 else 1]
            found.append({side: play(sides[side], steps, start) for side in order})
            about = {"against": against, "steps": steps, "start_weights": runs.digest(start[0])}
            yield about | {"pairs": found, "environment": report.environment("cpu")}


def ratios(pairs: Sequence[Pair], row: str) -> list[float]:
    """The working tree's CPU-seconds over those of the stored commit, pair by pair; empty where one side has none."""
    both = [(pair[TREE]["rows"].get(row, 0.0), pair[STORED_SIDE]["rows"].get(row, 0.0)) for pair in pairs]
    return [tree / stored for tree, stored in both] if all(stored and tree for tree, stored in both) else []


def median(pairs: Sequence[Pair], side: str, row: str) -> float:
    """CPU-seconds of a side."""
    return statistics.median(float(pair[side]["rows"].get(row, 0.0)) for pair in pairs)


def runs_of(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [run for pair in pairs for run in pair.values()]


def row_names(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(row for run in runs_of(pairs) for row in run["rows"]))


def lost(pairs: Sequence[Pair]) -> list[str]:
    """Rows of which more than 5 % is lost in every pair, and which are not next to nothing."""
    least = COUNTS * median(pairs, TREE, ALL)
    found = {row: ratios(pairs, row) for row in row_names(pairs) if median(pairs, TREE, row) > least}
    return [row for row, values in found.items() if values and min(values) > LOST]


def table(pairs: Sequence[Pair]) -> str:
    """A line for each phase and part."""
    rows = []
    for row in row_names(pairs):
        values = ratios(pairs, row)
        seconds = [f"{median(pairs, side, row):.3f}" for side in (STORED_SIDE, TREE)]
        verdict = "LOST" if row in lost(pairs) else ""
        rows.append((row, *seconds, measured.spread(values, 3) if values else "in one side only", verdict))
    return report.markdown(
        ("CPU-s a step (start: in all)", STORED_SIDE, TREE, "ratio, median (least to most)", ""), rows
    )


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    pairs: list[Pair] = result["pairs"]
    same = all(pair[STORED_SIDE]["rewards"] == pair[TREE]["rewards"] for pair in pairs)
    work = "the same" if same else "NOT the same, so the sides did other work"
    found = lost(pairs)
    verdict = f"More than 5 % is lost in: {', '.join(found)}." if found else "Nothing has lost more than 5 %."
    return "\n\n".join(
        [
            "# CPU-seconds of training against a stored commit",
            f"Against {result['against']}: {len(pairs)} pairs in alternating order, steps {WARM + 1} to "
            f"{WARM + result['steps']} of the quickstart from its start weights. Phases are those of the trainer's "
            f"process. A row is lost above {LOST} in every pair, if it is more than {COUNTS:.0%} of a step.",
            table(pairs),
            f"{verdict} Rewards of both sides are {work}.",
            f"{report.describe(result['environment'])} {measured.quiet(runs_of(pairs))}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    stored = json.loads(STORED.read_text(encoding="utf-8"))["commit"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="that are counted, of each run")
    parser.add_argument("--against", default=stored, metavar="COMMIT", help="default: the one in guard.json")
    parser.add_argument("--cache", type=Path, default=runs.CACHE, help="for the start weights")
    parser.add_argument("--out", type=Path, help="folder for guard.json and guard.md")
    options = parser.parse_args(argv)
    measured.adopt_orphans()
    result: dict[str, Any] = {}
    for result in compare(options.against, options.pairs, options.steps, options.cache):
        print(text(result), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "guard.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.out / "guard.md").write_text(text(result) + "\n")
    return 1 if lost(result["pairs"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
