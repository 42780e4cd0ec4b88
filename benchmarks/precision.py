"""Noise between sampler and trainer by position, in float32, bfloat16 and float16: `policy.dtype` of one run each.

    PYTHONPATH=.:answers:kernels:sandbox:launchers python -m benchmarks.precision MODEL PROMPTS [--dtype float16 ...]
        [--prompts 4] [--samples 3] [--tokens 384] [--out benchmarks/results]

One step of `ctpo train` without tools. Every reward is 0, so that no trajectory has an advantage: the trainer makes one
pass without gradient over all of them, with the weights that the engine sampled with. The figures are of the run's
`positions.jsonl`, whose anchor is the sampler (`objective.anchor: behaviour`): d_t is the trainer's log-prob of a token
minus the sampler's, S_t the sum of d up to token t. On a CPU float16 is slow. Of a dtype that is measured again the
figures in the file are replaced, and the others stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kernels import report
from ctpo_megatron.base.positions import LAST_POSITIONS, PositionStats
from ctpo_megatron.plan import (
    ELEMENT_BYTES,
)

ENDS = (16, 64, 128, 256, 512, 1024)
"""Last positions of the rows."""
DEADLINE_S = 900.0
REWARD = "def nothing(trajectory, prompt):\n    return 0.0\n"
Figures = dict[str, Any]


def overrides(model: Path, prompts: Path, dtype: str, sizes: argparse.Namespace, folder: Path) -> list[str]:
    """Of `configs/no_tools.yaml`."""
    settings: dict[str, Any] = {
        "run.name": dtype,
        "run.root": folder,
        "run.steps": 1,
        "model.path": model.absolute(),
        "data.train": f"[{prompts.absolute()}]",
        "data.system_prompt": "Explain every step in detail.",
        "data.unverifiable": "drop",
        "extensions.path": f"[{folder}]",
        "reward.function": "zero:nothing",
        "objective.anchor": "behaviour",
        "policy.dtype": dtype,
        "policy.mini_batch_prompts": sizes.prompts,
        "policy.threads": os.cpu_count(),
        "rollout.prompts_per_step": sizes.prompts,
        "rollout.samples_per_prompt": sizes.samples,
        "rollout.max_response_tokens": sizes.tokens,
        "rollout.engine.max_model_len": 512 + sizes.tokens,
        "rollout.engine.threads": os.cpu_count(),
        "checkpoint.every": 0,
        "export.enabled": "false",
        "tracking.report": "false",
        "tracking.live": "plain",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def measure(model: Path, prompts: Path, dtype: str, sizes: argparse.Namespace) -> Figures:
    """Rows of one precision. Raises RuntimeError with the end of the output when the run fails."""
    with tempfile.TemporaryDirectory(prefix="ctpo-precision-") as name:
        folder = Path(name)
        (folder / "zero.py").write_text(REWARD)
        command = [sys.executable, "-m", "ctpo_megatron.cli", "train", "configs/no_tools.yaml"]
        command += overrides(model, prompts, dtype, sizes, folder)
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{dtype}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
        lines = [json.loads(line) for line in (folder / dtype / "positions.jsonl").read_text().splitlines()]
    [first] = [line for line in lines if line["mini_batch"] == "first"]
    sizes_of = {name: getattr(sizes, name) for name in ("prompts", "samples", "tokens")}
    return {"rows": rows(PositionStats.of_record(first)), **sizes_of, "environment": report.environment("cpu")}


def rows(stats: PositionStats) -> list[Figures]:
    """Root mean squares of d and S, in nats, of the tokens up to each of `ENDS` and after the one before."""
    found, start = [], 0
    for last in ENDS:
        end = LAST_POSITIONS.index(last) + 1
        sums = {name: float(stats.column(name)[:, start:end].sum()) for name in ("n_computed", "d", "d2", "S2")}
        begin, start = (LAST_POSITIONS[start - 1] + 1 if start else 1), end
        if tokens := sums["n_computed"]:
            root = {name: math.sqrt(sums[name + "2"] / tokens) for name in ("d", "S")}
            found.append({"first": begin, "last": last, "tokens": int(tokens), **root, "mean": sums["d"] / tokens})
    return found


def text(found: dict[str, Figures]) -> str:
    """The results as Markdown."""
    table = [
        (dtype, f"{row['first']} to {row['last']}", row["tokens"], *(f"{row[name]:.2g}" for name in ("d", "S")))
        for dtype, figures in found.items()
        for row in figures["rows"]
    ]
    header = ["`policy.dtype`", "position t", "tokens", "rms of d_t", "rms of S_t"]
    sizes = next(iter(found.values()))
    return "\n\n".join(
        [
            "# Noise between sampler and trainer, by precision and position",
            f"Nats, at equal weights; {sizes['prompts']} prompts x {sizes['samples']} samples, at most "
            f"{sizes['tokens']} tokens each. Each precision has trajectories of its own engine.",
            report.markdown(header, table),
            *(f"{dtype}: {report.describe(figures['environment'])}" for dtype, figures in found.items()),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face directory with a chat template")
    parser.add_argument("data", type=Path, help="prompts, as `data.train`")
    parser.add_argument("--dtype", nargs="+", choices=ELEMENT_BYTES, default=list(ELEMENT_BYTES))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--out", type=Path, help="folder for precision.json and precision.md")
    options = parser.parse_args(argv)
    path = options.out and options.out / "precision.json"
    found: dict[str, Figures] = json.loads(path.read_text()) if path and path.exists() else {}
    for dtype in options.dtype:
        found[dtype] = measure(options.model, options.data, dtype, options)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".md").write_text(text(found) + "\n")
    print(text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
