"""What a batch begins with: log-probs of its first weights, by a pass of their own or by the first update's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ctpo_megatron.config import ObjectiveConfig
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.policy.context import Targets
from ctpo_megatron.policy.correction import apply_correction
from ctpo_megatron.policy.minibatch import MiniBatch
from ctpo_megatron.policy.parallel import Layout, gather_objects
from ctpo_megatron.policy.step import Collected


@dataclass(frozen=True)
class BatchStart:
    """Which old log-probs a batch needs before its first update, and what all that are known tell.

    equal_weights: see `apply_correction`. check: given the metrics, it raises if the batch must not be trained on.
    """

    objective: ObjectiveConfig
    layout: Layout
    equal_weights: bool
    check: Callable[[Mapping[str, float]], None] = lambda _: None

    def ahead(self, mini_batches: Sequence[MiniBatch]) -> Sequence[MiniBatch]:
        """Those whose old log-probs need a pass of their own.

        A correction decides before the first loss, so it needs all. Else the first mini-batch is trained on with the
        weights that the batch begins with: its own pass gives them. Ratios against the sampler need no others.
        """
        correction = self.objective.correction
        if correction.level != "none" or correction.rejects:
            return mini_batches
        return () if self.objective.anchor == "behaviour" else mini_batches[1:]

    def metrics(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """`start_metrics`, and those of the correction, which is made; raises as `check` does. Collective."""
        found = start_metrics(mini_batches, self.layout)
        found |= apply_correction(mini_batches, self.objective, self.layout, self.equal_weights)
        self.check(found)
        return found


def start_metrics(mini_batches: Sequence[MiniBatch], layout: Layout) -> dict[str, float]:
    """`mismatch/*` (|sampler - trainer| in nats) and `actor/entropy` (nats over model tokens) of the old log-probs.

    Compared are the `mismatch/tokens` that the weights at hand have sampled. The same on every rank; collective. What
    there is no token for is left out.
    """
    micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
    mine = _totals(micro_batches) if layout.reports else None
    parts = [totals for totals in gather_objects(mine) if totals is not None]
    tokens, compared = (sum(totals[name] for totals in parts) for name in ("tokens", "compared"))
    found = {"mismatch/tokens": compared}
    if tokens:
        found["actor/entropy"] = sum(totals["entropy"] for totals in parts) / tokens
    if compared:
        found["mismatch/log_prob_abs_max"] = max(totals["max"] for totals in parts)
        found["mismatch/log_prob_abs_mean"] = sum(totals["sum"] for totals in parts) / compared
    return found


def collect(targets: Targets, log_probs: torch.Tensor | None, entropy: torch.Tensor | None) -> Collected:
    """What a pass keeps of the rows of this rank: `log_probs` `[N]`, aligned with the tokens, and `entropy_sum`."""
    kept: Collected = {}
    if log_probs is not None:
        kept["log_probs"] = targets.per_token(log_probs)
    if entropy is not None:
        kept["entropy_sum"] = targets.per_token(entropy).sum(dtype=torch.float64)
    return kept


def keep_log_probs(micro_batches: Sequence[PackedBatch], kept: Sequence[Collected]) -> None:
    """Give micro-batches what the last pass over them kept (nothing before the last pipeline stage).

    Where they are `on_policy`, these are the old log-probs, and the next pass is another's.
    """
    for micro, found in zip(micro_batches, kept, strict=False):
        micro.log_probs = found.get("log_probs")
        if micro.on_policy:
            micro.old_log_probs, micro.entropy_sum = micro.log_probs, found["entropy_sum"]
    for micro in micro_batches:
        micro.on_policy = False


def old_log_probs_of(micro: PackedBatch) -> torch.Tensor:
    """Raises ValueError where no pass has given them."""
    if micro.old_log_probs is None:
        raise ValueError("compute_old_log_probs comes before what compares with old log-probs")
    return micro.old_log_probs


def _totals(micro_batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Sums over the tokens of these micro-batches; one read-back.

    sum, max: of |sampler - trainer| (nats) over the `compared` tokens, which the weights at hand have sampled.
    """
    places = [m.on_host.current.nonzero().squeeze(1) for m in micro_batches]
    difference = torch.cat(
        [
            (old_log_probs_of(m) - m.rollout_log_probs)[at.to(m.token_ids.device, non_blocking=True)].abs()
            for m, at in zip(micro_batches, places, strict=True)
        ]
    )
    largest = difference.max() if difference.numel() else difference.sum()  # nothing is compared
    entropies = [micro.entropy_sum for micro in micro_batches if micro.entropy_sum is not None]
    found = [largest.double(), difference.sum().double(), *entropies]
    most, total, *sums = torch.stack(found).tolist()
    tokens = sum(int(m.on_host.response_mask.sum()) for m in micro_batches)
    compared = float(difference.numel())
    return {"max": most, "sum": total, "compared": compared, "tokens": float(tokens), "entropy": sum(sums)}
