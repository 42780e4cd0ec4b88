"""What one loss call reports: sums and extrema on the device, mergeable over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SUMS = (
    "loss",  # share of the aggregated loss
    "loss_tokens",
    "model_tokens",
    "minus_d",  # sum over response tokens of old_t - log_probs_t, nats
    "ratio_excess",  # sum over loss tokens of r_t - 1; r is close to 1, and the variance of r itself would cancel
    "ratio_excess_squared",
    "clip_high",
    "clip_low",
    "clip_dual",
    "capped",  # loss tokens with log r_t above the cap of 10
)
MAXIMA = ("ratio", "minus_ratio", "abs_log_ratio")


@dataclass(frozen=True)
class CTPOStats:
    """Statistics of a loss call; nothing here has been read back to the host.

    sums: float64 `[len(SUMS)]`, entries as `SUMS` names them; counts are exact to 2^53.
    maxima: float64 `[len(MAXIMA)]`, -inf where no token took part. The ratio's are over loss tokens, |log r| (before
        the cap) over all response tokens.
    Merge several by adding `sums` and taking the largest `maxima`.
    """

    sums: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def from_vector(cls, vector: torch.Tensor) -> CTPOStats:
        """Split float64 `[len(SUMS) + len(MAXIMA)]`."""
        return cls(vector[: len(SUMS)], vector[len(SUMS) :])


@dataclass(frozen=True)
class PerToken:
    """Per-token results `[N]`, detached; 0 where they do not apply.

    loss: float, l_t w_t before aggregation. log_ratio: float, log r_t before the cap (response tokens), nats.
    prefix: int64, S_t in units of 2^-40 nats. clip: int8, of loss tokens. 0: inside the window; 1: above it (A > 0); 2:
    below it (A < 0); 3: beyond the dual bound (A < 0). 4: inside, but with log r above the cap of 10. With
    "detached_ratio" 1 and 2 are of either sign, and the gradient stays, also at 4.
    """

    loss: torch.Tensor
    log_ratio: torch.Tensor
    prefix: torch.Tensor
    clip: torch.Tensor
