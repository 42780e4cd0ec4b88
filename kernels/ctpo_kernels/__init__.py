"""CTPO kernels: log-probs and the policy loss in one pass, on CUDA by Triton and anywhere in plain torch.

- `ctpo_loss`: loss, gradient and statistics of given log-probs.
- `vocab_parallel_log_probs`: log-probs of given logits; `linear_log_probs`: of hidden states, logits in chunks.
- `fused_linear_ctpo`: output layer, log-probs, loss and gradients in one sweep.
- `chunk_rows`: the rows of logits at a time that suit a GPU's free memory.
- `swiglu`, `rotate`: the activation and the rotary embedding of a layer, each in one launch.
- `warm_up`: compiles the kernels of a run before its first step, given examples of its `LossTensors`.
- `CTPOStats`, `PerToken`, `SUMS`, `MAXIMA`: what a loss reports.

The environment variable `CTPO_KERNELS_BACKEND` chooses the implementation: `torch` or `triton`.

torch is imported when the first of these is used: `ctpo_kernels.names` alone does not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

__all__ = [
    "MAXIMA",
    "SUMS",
    "CTPOStats",
    "LossTensors",
    "PerToken",
    "chunk_rows",
    "ctpo_loss",
    "fused_linear_ctpo",
    "linear_log_probs",
    "rotate",
    "swiglu",
    "vocab_parallel_log_probs",
    "warm_up",
]

if TYPE_CHECKING:
    from ctpo_kernels.chunks import chunk_rows
    from ctpo_kernels.compilation import warm_up
    from ctpo_kernels.fused_linear import fused_linear_ctpo
    from ctpo_kernels.layer import rotate, swiglu
    from ctpo_kernels.linear import linear_log_probs
    from ctpo_kernels.logprob import vocab_parallel_log_probs
    from ctpo_kernels.loss import ctpo_loss
    from ctpo_kernels.packed import LossTensors
    from ctpo_kernels.stats import MAXIMA, SUMS, CTPOStats, PerToken
else:
    _MODULES = {
        "chunk_rows": "chunks",
        "warm_up": "compilation",
        "fused_linear_ctpo": "fused_linear",
        "linear_log_probs": "linear",
        "rotate": "layer",
        "swiglu": "layer",
        "vocab_parallel_log_probs": "logprob",
        "ctpo_loss": "loss",
        "LossTensors": "packed",
        **dict.fromkeys(("MAXIMA", "SUMS", "CTPOStats", "PerToken"), "stats"),
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
