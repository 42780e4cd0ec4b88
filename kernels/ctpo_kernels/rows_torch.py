"""Row work on logits in plain torch: softmax statistics, their merge over vocabulary shards, gradients in place.

The statistics of C rows on one shard are float `[C, 4]`. With x the largest logit of a row and a = (logit - x) / T they
are x, sum e^a, the label's a and sum e^a a. The label's a is NaN where another shard owns it; the last sum is 0 unless
entropy is requested. The subtraction comes before the division, so that the rounding of a large logit / T is not in the
log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED_LABEL = -100


def _initialise_math_library() -> None:
    """Call exp and log once in one thread.

    MKL initialises such a function at its first call. If two threads enter it together, one of them may get the
    low-accuracy variant for that call. This gives relative errors of 1e-4 in half of the rows, in about one process of
    a hundred (torch 2.13). Log-probs of the anchor pass and of training would then differ.
    """
    for dtype in (torch.float32, torch.float64):
        torch.ones(1, dtype=dtype).exp_().log_()


_initialise_math_library()


@dataclass(frozen=True)
class Shard:
    """Which vocabulary columns this rank holds. start: global id of column 0; valid: columns that are not padding."""

    start: int
    valid: int


@dataclass(frozen=True)
class Merged:
    """log_probs, lse, entropy: float `[C]`, nats; lse is log sum exp of logits / T over the whole vocabulary."""

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class EntropyGradient:
    """value: entropies `[C]` of the rows, nats; g: derivative `[C]` of the loss with respect to them."""

    value: Tensor
    g: Tensor

    def rows(self, rows: slice) -> EntropyGradient:
        """Return the values and derivatives of a range of rows."""
        return EntropyGradient(self.value[rows], self.g[rows])


def row_stats(logits: Tensor, labels: Tensor, shard: Shard, temperature: float, *, entropy: bool) -> Tensor:
    """Statistics `[C, 4]` of this shard. float32 or float64 `logits` `[C, V]` become e^a."""
    if shard.valid < logits.shape[1]:
        logits[:, max(shard.valid, 0) :] = float("-inf")
    largest = logits.amax(dim=1)
    # In a shard of padding only, or of -inf, the exponentials are 0 instead of exp(-inf + inf).
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    logits.sub_(shift[:, None])
    if temperature != 1.0:
        logits.mul_(1.0 / temperature)
    target = _own_logits(logits, labels, shard)
    if entropy:
        finite = logits.clamp(min=torch.finfo(logits.dtype).min)  # 0 * -inf is NaN
        weighted = finite.mul_(logits.exp_()).sum(dim=1)
    else:
        logits.exp_()
        weighted = torch.zeros_like(largest)
    return torch.stack([largest, logits.sum(dim=1), target, weighted], dim=1)


def merge_stats(parts: Tensor, labels: Tensor, temperature: float, out: Tensor | None = None) -> Merged:
    """Statistics of all shards `[tp, C, 4]` -> log-probs, in rank order, so that every rank gets the same bits.

    IGNORED_LABEL gives log-prob 0; a label that no shard owns gives NaN. out: `[C]`, receives the log-probs.
    """
    largest, sums, targets, weighted = parts.unbind(dim=2)
    top = largest.amax(dim=0)
    shift = torch.where(top == float("-inf"), 0.0, top)
    away = (largest - shift) * (1.0 / temperature)
    factor = away.exp()
    total = (sums * factor).sum(dim=0)
    log_total = total.log()
    absent = targets.isnan()
    target = torch.where(absent.all(dim=0), torch.nan, torch.where(absent, float("-inf"), targets + away).amax(dim=0))
    log_probs = torch.where(labels == IGNORED_LABEL, 0.0, target - log_total)
    log_probs = log_probs if out is None else out.copy_(log_probs)
    # Each shard's sum of e^(z - m)(z - m) is relative to its own maximum m; an empty shard has m = -inf and adds
    # nothing.
    apart = torch.where(factor == 0, 0.0, away)
    entropy = log_total - (factor * (weighted + apart * sums)).sum(dim=0) / total
    return Merged(log_probs, shift * (1.0 / temperature) + log_total, entropy)


def gradient_after_stats(
    exponentials: Tensor, parts: Tensor, merged: Merged, labels: Tensor, g: Tensor, shard: Shard, temperature: float
) -> Tensor:
    """d (sum_i g_i log p_i) / d logits `[C, V]`, over the output of `row_stats`; parts: this shard's statistics."""
    largest = parts[:, 0]
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    g = g / temperature
    exponentials.mul_((-g * (shift * (1.0 / temperature) - merged.lse).exp())[:, None])
    return _add_at_labels(exponentials, labels, g, shard)


def gradient(
    logits: Tensor,
    lse: Tensor,
    labels: Tensor,
    g: Tensor,
    shard: Shard,
    temperature: float,
    *,
    entropy: EntropyGradient | None = None,
) -> Tensor:
    """Return the same from fresh float32 or float64 logits and the lse of an earlier pass, in place.

    entropy: also adds the gradient of sum_i g_i entropy_i with these g.
    """
    if shard.valid < logits.shape[1]:
        logits[:, max(shard.valid, 0) :] = float("-inf")
    if temperature != 1.0:
        logits.mul_(1.0 / temperature)
    g = g / temperature
    logits.sub_(lse[:, None])
    extra = None if entropy is None else _entropy_gradient(logits, entropy, temperature)
    _add_at_labels(logits.exp_().mul_(-g[:, None]), labels, g, shard)
    return logits if extra is None else logits.add_(extra)


def _entropy_gradient(log_p: Tensor, entropy: EntropyGradient, temperature: float) -> Tensor:
    """-g / T p (log p + entropy), 0 where p is."""
    p = log_p.exp()
    surprise = torch.where(p == 0, 0.0, log_p) + entropy.value[:, None]
    return surprise.mul_(p).mul_(-(entropy.g / temperature)[:, None])


def _own(labels: Tensor, shard: Shard, columns: int) -> tuple[Tensor, Tensor]:
    """Column of each label `[C]` (0 where another shard owns it), and whether this shard owns it."""
    local = labels - shard.start
    owned = (local >= 0) & (local < min(shard.valid, columns))
    return local.where(owned, 0), owned


def _own_logits(logits: Tensor, labels: Tensor, shard: Shard) -> Tensor:
    column, owned = _own(labels, shard, logits.shape[1])
    return torch.where(owned, logits.gather(1, column[:, None]).squeeze(1), torch.nan)


def _add_at_labels(rows: Tensor, labels: Tensor, g: Tensor, shard: Shard) -> Tensor:
    column, owned = _own(labels, shard, rows.shape[1])
    row = torch.arange(rows.shape[0], device=rows.device)
    return rows.index_put_((row, column), torch.where(owned, g, 0.0).to(rows.dtype), accumulate=True)
