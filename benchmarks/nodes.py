"""RMSNorm and rotary embedding as one node of the autograd graph each, against torch's and megatron's own operations.

    PYTHONPATH=.:kernels python -m benchmarks.nodes [--rounds 30] [--threads 1] [--out benchmarks/results]

Forward and backward passes in one process, in turns, on rows of the quickstart's and of a wider model; between two
calls a large tensor is written, so that inputs come from memory, as in a training step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from benchmarks.kernels import report
from ctpo_megatron.policy.nodes import rms_norm, rotate

NORMS = {"norm, quickstart": (1200, 96), "norm of heads, quickstart": (1200, 4, 32), "norm, wide": (2048, 1024)}
TURNS = {"rotation, quickstart": (1200, 4, 32), "rotation, wide": (2048, 16, 128)}
EPS = 1e-6
CACHE_BYTES = 64 << 20

Side = Callable[[], torch.Tensor]


def norm(shape: tuple[int, ...]) -> tuple[list[torch.Tensor], Side, Side]:
    """Inputs with gradients, ours and torch's."""
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    return [x, weight], partial(rms_norm, x, weight, EPS), partial(F.rms_norm, x, (shape[-1],), weight, EPS)


def rotation(shape: tuple[int, ...]) -> tuple[list[torch.Tensor], Side, Side]:
    """Inputs with gradients, ours and megatron's; both with the angles of each row at hand."""
    t, angles = torch.randn(shape, requires_grad=True), torch.randn(shape[0], 1, shape[-1] // 2)
    cosine, sine, both = angles.cos(), angles.sin(), torch.cat([angles, angles], dim=-1)[:, None]
    return [t], partial(rotate, t, cosine, sine), lambda: _apply_rotary_pos_emb_bshd(t[:, None], both)[:, 0]


def timed(side: Side, inputs: list[torch.Tensor], way: torch.Tensor, flushed: torch.Tensor) -> float:
    """Microseconds of one forward and backward pass."""
    flushed.fill_(0.0)
    begun = time.perf_counter()
    torch.autograd.grad(side(), inputs, way)
    return 1e6 * (time.perf_counter() - begun)


def compare(inputs: list[torch.Tensor], ours: Side, theirs: Side, rounds: int) -> dict[str, float]:
    """Medians of both, and of their ratios. Raises AssertionError when their gradients differ."""
    way, flushed = torch.randn_like(inputs[0]), torch.empty(CACHE_BYTES // 4)
    for mine, other in zip(*(torch.autograd.grad(side(), inputs, way) for side in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    pairs = [[timed(side, inputs, way, flushed) for side in (ours, theirs)] for _ in range(rounds)]
    low, ratio, high = statistics.quantiles([mine / other for mine, other in pairs], n=4)
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return {"ours_us": medians[0], "theirs_us": medians[1], "ratio": ratio, "low": low, "high": high}


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = [
        (name, f"{r['ours_us']:.0f}", f"{r['theirs_us']:.0f}", f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})")
        for name, r in result["found"].items()
    ]
    header = ("forward and backward", "one node, us", "operations, us", "ratio (quartiles)")
    setting = report.describe(result["environment"])
    return f"# One node against operations\n\n{report.markdown(header, rows)}\n\n{setting}\n"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for nodes.json and nodes.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases = {name: norm(shape) for name, shape in NORMS.items()}
    cases |= {name: rotation(shape) for name, shape in TURNS.items()}
    found = {name: compare(*case, options.rounds) for name, case in cases.items()}
    result = {"found": found, "environment": report.environment("cpu", options.threads)}
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "nodes.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "nodes.md").write_text(text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
