"""CTPO kernels: log-probs and the policy loss in one pass, on CUDA by Triton and anywhere in plain torch.

- `ctpo_loss`: loss, gradient and statistics of given log-probs.
- `vocab_parallel_log_probs`: log-probs of given logits; `linear_log_probs`: of hidden states, logits in chunks.
- `fused_linear_ctpo`: output layer, log-probs, loss and gradients in one sweep.
- `use_backend`: which implementation runs. `CTPOStats`, `PerToken`, `SUMS`, `MAXIMA`: what a loss reports.
"""

from ctpo_kernels.ctpo_loss import ctpo_loss
from ctpo_kernels.dispatch import use_backend
from ctpo_kernels.fused_linear_ctpo import fused_linear_ctpo
from ctpo_kernels.linear import linear_log_probs
from ctpo_kernels.logprob import vocab_parallel_log_probs
from ctpo_kernels.stats import MAXIMA, SUMS, CTPOStats, PerToken

__all__ = [
    "MAXIMA",
    "SUMS",
    "CTPOStats",
    "PerToken",
    "ctpo_loss",
    "fused_linear_ctpo",
    "linear_log_probs",
    "use_backend",
    "vocab_parallel_log_probs",
]
