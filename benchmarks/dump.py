"""CPU seconds and bytes of a dump of trajectories, by format: `python -m benchmarks.dump [--model DIR]`."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.kernels import report
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.run.reporter import decoder
from ctpo_megatron.tracking import read_trajectories, trajectory_of, write_trajectories

LENGTHS = (500, 2_000, 8_000)
FORMS = ("jsonl", "parquet")


def batch(vocabulary: int, length: int, tokens: int) -> list[Group]:
    """Groups of 8 trajectories of three turns with `length` random tokens each; log-probs as an engine reports them."""
    rng = random.Random(0)
    groups = []
    for number in range(max(1, tokens // length // 8)):
        group = Group(Prompt(f"p{number}", "bench", (), "4", ()), [])
        for sample in range(8):
            trajectory = Trajectory(f"p{number}", sample, seed=sample, reward=1.0, finish_reason="answer")
            trajectory.append_context([rng.randrange(vocabulary) for _ in range(length // 10)], 0)
            for turn in (1, 2, 3):
                count = length // 4
                ids = [rng.randrange(vocabulary) for _ in range(count)]
                log_probs = [-rng.randrange(1 << 20) / (1 << 18) for _ in ids]
                trajectory.append_model(ids, log_probs, [7] * count, turn)
                trajectory.append_context([rng.randrange(vocabulary) for _ in range(length // 20)], turn)
            group.trajectories.append(trajectory)
        groups.append(group)
    return groups


def measure(folder: Path, form: Any, groups: list[Group], decode: Any) -> dict[str, float]:
    """CPU seconds per million tokens to write and to read a step, and bytes a token; what is read equals what was."""
    tokens = sum(len(trajectory) for group in groups for trajectory in group.trajectories)
    began = time.process_time()
    path = write_trajectories(folder, 1, groups, decode, form=form)
    wrote = time.process_time()
    records = read_trajectories(path)
    read = time.process_time()
    assert [trajectory_of(record) for record in records] == [t for group in groups for t in group.trajectories]
    return {
        "tokens": tokens,
        "write_cpu_s": (wrote - began) * 1e6 / tokens,
        "read_cpu_s": (read - wrote) * 1e6 / tokens,
        "bytes": path.stat().st_size / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory with a tokenizer")
    parser.add_argument("--tokens", type=int, default=400_000, help="of a dump")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    decode, vocabulary = decoder(options.model), len(AutoTokenizer.from_pretrained(options.model))
    found = []
    for length, form in itertools.product(LENGTHS, FORMS):
        groups = batch(vocabulary, length, options.tokens)
        with tempfile.TemporaryDirectory() as folder:
            best = min((measure(Path(folder), form, groups, decode) for _ in range(3)), key=lambda m: m["write_cpu_s"])
        found.append({"length": length, "format": form, **best})
    about = report.environment("cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "dump.json").write_text(json.dumps({"environment": about, "rows": found}, indent=1) + "\n")
    rows = [
        (m["length"], m["format"], f"{m['write_cpu_s']:.2f}", f"{m['read_cpu_s']:.2f}", f"{m['bytes']:.1f}")
        for m in found
    ]
    text = "\n\n".join(
        (
            "# Dumps of trajectories",
            "CPU seconds per million tokens to write and to read, best of three, with decoded text; "
            f"{options.tokens:,} random tokens a dump.",
            report.markdown(("tokens a trajectory", "format", "write", "read", "bytes a token"), rows),
            report.describe(about),
        )
    )
    (options.out / "dump.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
