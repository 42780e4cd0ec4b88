"""The loss of the paper (arXiv 2605.07331) in eager torch on padded sequences: the formula that a trainer writes first.

Written from the formulas, with autograd for the gradient; it is the rival of suite A and, in float64, its reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW, HIGH, DUAL = 0.025, 0.05, 0.05
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def loss(log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs, old: `[B, L]`; mask: bool `[B, L]`; advantages: `[B]`.

    Returns the sequence-mean loss, log r_t and sqrt(t), `[B, L]` each.
    """
    d = torch.where(mask, (log_probs - old).clamp(-20.0, 20.0), 0.0)
    position = mask.cumsum(dim=1).clamp(min=1).to(log_probs.dtype)
    log_ratio = d.detach().cumsum(dim=1) + log_probs - log_probs.detach()
    log_ratio = torch.where(mask, log_ratio, 0.0)
    capped = log_ratio.clamp(max=10.0)
    scale = position.sqrt()
    advantage = advantages[:, None]
    free = -advantage * capped.exp()
    clipped = -advantage * capped.clamp(-LOW * scale, HIGH * scale).exp()
    worst = torch.maximum(free, clipped)
    bounded = torch.minimum(worst, -advantage * (DUAL * scale).exp())
    token = torch.where(mask, torch.where(advantage < 0, bounded, worst), 0.0)
    lengths = mask.sum(dim=1).clamp(min=1)
    return (token.sum(dim=1) / lengths).sum() / mask.shape[0], log_ratio.detach(), scale


def loss_with_diagnostics(log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, dict]:
    """The same with metrics read back to the host at once: quantiles, extrema, clip fractions, KL."""
    value, log_ratio, scale = loss(log_probs, old, mask, advantages)
    ratio = log_ratio.clamp(max=10.0).exp()[mask]
    metrics = {f"ratio_p{100 * q:g}": torch.quantile(ratio, q).item() for q in QUANTILES}
    positive = (advantages > 0)[:, None]
    high = mask & positive & (log_ratio > HIGH * scale)
    low = mask & ~positive & (log_ratio < -LOW * scale)
    dual = mask & ~positive & (log_ratio > DUAL * scale)
    tokens = mask.sum()
    for name, flags in (("high", high), ("low", low), ("dual", dual)):
        metrics[f"clip_{name}"] = (flags.sum() / tokens).item()
    metrics["kl"] = ((old - log_probs)[mask].mean()).item()
    for name in ("mean", "std", "min", "max"):
        metrics[f"ratio_{name}"] = getattr(ratio, name)().item()
    return value, metrics


def near_a_bound(log_ratio: Tensor, scale: Tensor, width: float) -> Tensor:
    """Where a difference of `width` nats could change a clip decision."""
    bounds = (HIGH * scale, -LOW * scale, DUAL * scale, torch.full_like(scale, 10.0))
    return torch.stack([(log_ratio - bound).abs() < width for bound in bounds]).any(dim=0)
