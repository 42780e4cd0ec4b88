"""Kernels of vLLM's library against torch: does the driver take a library of which one architecture was kept?

`rms_norm`, `silu_and_mul` and `reshape_and_cache_flash`, in the shapes of a decoding step of Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

TOKENS, HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM, BLOCK = 64, 1024, 3072, 8, 128, 16
EPSILON = 1e-6
LIMIT = 2**-6
"""Of |difference| over the largest value: two units in the last place of bfloat16."""


def main() -> None:
    """Write the largest differences as JSON to `--out`; exit status 1 if a kernel computes something else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour.pruned", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figures: dict[str, float | str] = {}
    for name, difference in KERNELS.items():
        if options.device == "cpu" and not _has(name):
            figures[name] = "not in the build for CPUs"
        else:
            figures[name] = difference(options.device)
        print(f"{name}: {figures[name]}", flush=True)
    options.out.write_text(json.dumps(figures) + "\n")
    if wrong := [name for name, value in figures.items() if isinstance(value, float) and not value <= LIMIT]:
        raise SystemExit(f"{', '.join(wrong)}: differs from torch by more than {LIMIT:g} of the largest value")


def _has(name: str) -> bool:
    from vllm import _custom_ops  # noqa: F401 - loads the library

    return any(hasattr(getattr(torch.ops, library), name) for library in ("_C", "_C_cache_ops"))


def _random(*shape: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def _difference(computed: torch.Tensor, expected: torch.Tensor) -> float:
    computed, expected = computed.double(), expected.double()
    return float((computed - expected).abs().max() / expected.abs().max())


def _rms_norm(device: str) -> float:
    from vllm import _custom_ops

    rows, weight = _random(TOKENS, HIDDEN, device=device), _random(HIDDEN, device=device)
    normed = torch.empty_like(rows)
    _custom_ops.rms_norm(normed, rows, weight, EPSILON)
    return _difference(normed, functional.rms_norm(rows.double(), (HIDDEN,), weight.double(), EPSILON))


def _silu_and_mul(device: str) -> float:
    from vllm import _custom_ops  # noqa: F401 - loads the library

    both = _random(TOKENS, 2 * INTERMEDIATE, device=device)
    product = both.new_empty(TOKENS, INTERMEDIATE)
    torch.ops._C.silu_and_mul(product, both)
    gate, up = both.double().chunk(2, -1)
    return _difference(product, functional.silu(gate) * up)


def _reshape_and_cache(device: str) -> float:
    from vllm import _custom_ops

    keys, values = (_random(TOKENS, HEADS, HEAD_DIM, device=device) for _ in range(2))
    caches = [keys.new_zeros(TOKENS // BLOCK * 2, BLOCK, HEADS, HEAD_DIM) for _ in range(2)]
    slots = torch.randperm(2 * TOKENS, generator=torch.Generator().manual_seed(0))[:TOKENS].to(device)
    one = torch.ones((), device=device)
    _custom_ops.reshape_and_cache_flash(keys, values, *caches, slots, "auto", one, one)
    stored = [cache.flatten(0, 1)[slots] for cache in caches]
    return max(_difference(kept, given) for kept, given in zip(stored, (keys, values), strict=True))


KERNELS: dict[str, Callable[[str], float]] = {
    "rms_norm": _rms_norm,
    "silu_and_mul": _silu_and_mul,
    "reshape_and_cache_flash": _reshape_and_cache,
}


if __name__ == "__main__":
    main()
