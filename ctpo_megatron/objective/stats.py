"""What a loss returns: sums, counts and extrema, which merge exactly over micro-batches and ranks; never means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ctpo_kernels import MAXIMA, SUMS

StatsKind = Literal["policy", "supervised", "function"]


@dataclass(frozen=True)
class LossStats:
    """Statistics of one or more loss calls, on the device of the loss and detached.

    sums: float64 `[len(SUMS)]`, entries as `ctpo_kernels.SUMS` names them; counts are exact to 2^53.
    maxima: float64 `[len(MAXIMA)]`, -inf where no token took part. The ratio's are over loss tokens, |log r| (before
        the cap) over all model tokens.
    kind: which loss reported; only equal kinds merge.
    named: metrics of a user's objective, name -> float64 `[2]` (sum, count).
    """

    sums: Tensor
    maxima: Tensor
    kind: StatsKind = "policy"
    named: Mapping[str, Tensor] = field(default_factory=dict)

    def cpu(self) -> LossStats:
        """Return a copy on the CPU, to send to other ranks."""
        sums, maxima = self.as_tensor().cpu().split([len(SUMS), len(MAXIMA)])
        return LossStats(sums, maxima, self.kind, {name: pair.cpu() for name, pair in self.named.items()})

    def as_tensor(self) -> Tensor:
        """Sums and maxima as one float64 vector, which takes one copy to the host."""
        return torch.cat([self.sums, self.maxima])

    def without_sums(self) -> LossStats:
        """Return the same extrema, and sums over nothing: of a rank that computed what another reports."""
        named = {name: torch.zeros_like(pair) for name, pair in self.named.items()}
        return replace(self, sums=torch.zeros_like(self.sums), named=named)


@dataclass(frozen=True)
class PolicyLossOutput:
    """loss: scalar, differentiable. per_token: l_t w_t in the shape of log_probs, before aggregation, 0 where the loss
    mask is 0. It is part of the graph in plain torch (detach it before keeping it), detached where the kernels compute
    it, and None from `linear_policy_loss`. stats: detached. log_probs, entropy: nats, detached, in the shape of the
    labels; None unless requested."""

    loss: Tensor
    per_token: Tensor | None
    stats: LossStats
    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def stats_of(
    sums: dict[str, Tensor],
    maxima: dict[str, tuple[Tensor, Tensor]] | None = None,
    kind: StatsKind = "policy",
    named: Mapping[str, Tensor] | None = None,
) -> LossStats:
    """Assemble `LossStats` without a host synchronisation.

    sums: name of `SUMS` -> scalar; a name left out is 0. maxima: name of `MAXIMA` -> (values, bool mask), both `[N]`.
    """
    zero = torch.zeros_like(next(iter(sums.values())), dtype=torch.float64)
    none = zero.reshape(1) - math.inf

    def maximum(name: str) -> Tensor:
        if not maxima or name not in maxima:
            return none[0]
        values, mask = maxima[name]
        # The appended -inf defines the maximum over no tokens.
        return torch.cat([torch.where(mask, values.double(), -math.inf), none]).amax()

    return LossStats(
        torch.stack([sums[name].detach().double() if name in sums else zero for name in SUMS]),
        torch.stack([maximum(name) for name in MAXIMA]),
        kind,
        named or {},
    )


def merge(stats: Sequence[LossStats]) -> LossStats:
    """Return one record for several micro-batches or ranks: sums add, maxima take the largest. NaN survives.

    Raises ValueError for an empty list or different kinds.
    """
    kinds = {part.kind for part in stats}
    if len(kinds) != 1:
        raise ValueError(f"merge needs statistics of exactly one kind; got {sorted(kinds) or 'none'}")
    sums = torch.stack([part.sums for part in stats]).sum(0)
    maxima = torch.stack([part.maxima for part in stats]).amax(0)
    names = dict.fromkeys(name for part in stats for name in part.named)
    named = {name: torch.stack([part.named[name] for part in stats if name in part.named]).sum(0) for name in names}
    return LossStats(sums, maxima, stats[0].kind, named)


def summarize(stats: LossStats, loss_tokens: int | None = None) -> dict[str, float]:
    """Metrics of merged statistics (one host synchronisation). A mean over no token is left out, not reported as 0.

    loss_tokens: of the step, where trajectories of advantage 0 are left out of the passes; such a token is never
    clipped, so rates are over all of them. Names in `_computed` are over the tokens in the passes, as are all other
    means: log-probs of the others move too. `actor/ppo_kl` is the mean of -d_t over model tokens, the first-order
    estimate of the divergence from the anchor. `actor/pg_clipfrac` counts tokens whose loss the two-sided bounds
    changed, `actor/pg_clipfrac_lower` those that the dual bound changed. `pg_update/is_ratio/*` is r_t over loss tokens
    with the unbiased standard deviation. A user's objective reports `objective/<name>` instead, and token ratios in
    `pg_update/log_ratio_abs_max`. `actor/pg_loss` is the loss of the step if every call used the step's denominators.
    """
    values = stats.as_tensor().tolist()
    total = dict(zip(SUMS, values, strict=False))
    maximum = dict(zip(MAXIMA, values[len(SUMS) :], strict=True))
    if stats.kind == "supervised":
        return {"supervised/loss": total["loss"]}
    n = total["loss_tokens"]
    everywhere = n if loss_tokens is None else float(loss_tokens)
    metrics = {"actor/pg_loss": total["loss"], "pg_update/loss_tokens": everywhere, "pg_update/computed_tokens": n}
    if total["model_tokens"]:
        metrics["actor/ppo_kl"] = total["minus_d"] / total["model_tokens"]
        metrics["pg_update/log_ratio_abs_max"] = maximum["abs_log_ratio"]
    if stats.kind == "function":
        pairs = {name: pair.tolist() for name, pair in stats.named.items()}
        return metrics | {f"objective/{name}": value / count for name, (value, count) in pairs.items() if count}
    clipped = {side: total[f"clip_{side}"] for side in ("high", "low", "dual")}
    clipped["total"] = sum(clipped.values())
    metrics |= {f"pg_update/clip/{side}/count": count for side, count in clipped.items()}
    metrics["pg_update/log_ratio_capped/count"] = total["capped"]
    for tokens, which in ((everywhere, ""), (n, "_computed")):
        if tokens:
            metrics |= {f"pg_update/clip/{side}/rate{which}": count / tokens for side, count in clipped.items()}
            metrics[f"actor/pg_clipfrac{which}"] = (clipped["high"] + clipped["low"]) / tokens
            metrics[f"actor/pg_clipfrac_lower{which}"] = clipped["dual"] / tokens
    if n:
        excess = total["ratio_excess"] / n
        metrics["pg_update/is_ratio/mean"] = 1 + excess
        metrics["pg_update/is_ratio/min"] = -maximum["minus_ratio"]
        metrics["pg_update/is_ratio/max"] = maximum["ratio"]
        if n > 1:
            variance = (total["ratio_excess_squared"] - n * excess**2) / (n - 1)
            # Rounding may give a variance of -1e-20; NaN propagates.
            metrics["pg_update/is_ratio/std"] = 0.0 if variance <= 0 else math.sqrt(variance)
    return metrics
