"""The keywords of the loss, checked and reduced to the few numbers that kernels need."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ctpo_kernels.names import CLIP_MODES, LOSS_AGG_MODES, RATIO_MODES
from ctpo_kernels.packed import PackedTokens

D_LIMIT = 20.0
"""log_probs_t - old_t is clamped to +- this (nats) before it enters a sum."""

LOG_RATIO_CAP = 10.0
"""log r_t above this (nats) is cut, and its gradient is zero."""

FRACTION_BITS = 40
"""S_t is summed in integer units of 2^-40 nats. |d| <= 20 takes 45 bits: 2^18 tokens at the limit fit into 64."""


class Bounds(NamedTuple):
    """Bounds of log r_t in nats, times t^power; dual is inf where it is off."""

    low: float
    high: float
    dual: float
    power: float


class LossSpec(NamedTuple):
    """What a loss call computes: the keywords of `ctpo_loss`, with its defaults. `check` checks them."""

    clip_low: float = 0.025
    clip_high: float = 0.05
    clip_c: float | None = 0.05
    clip_power: float = 0.5
    clip_mode: str = "log_power"
    ratio_mode: str = "cumprod"
    loss_agg_mode: str = "seq-mean-token-mean"
    loss_scale_factor: float = 1.0

    @property
    def per_sequence(self) -> bool:
        """Whether a token's loss is divided by the number of loss tokens of its sequence."""
        return self.loss_agg_mode == "seq-mean-token-mean"

    @property
    def whole_sequence(self) -> bool:
        """Whether a token's ratio needs tokens after it."""
        return self.ratio_mode in ("sequence", "sequence-geomean")

    @property
    def detached(self) -> bool:
        """Whether the bounded ratio is a constant factor of the log-prob, so that no bound ends a gradient."""
        return self.clip_mode == "detached_ratio"

    @property
    def bounds(self) -> Bounds:
        """The clip bounds in the form in which kernels compare: bounds of r itself become bounds of its logarithm."""
        low, high, dual, power = self.clip_low, self.clip_high, _dual(self), self.clip_power
        if self.clip_mode != "log_power":
            low = -math.log1p(-low) if low < 1 else math.inf
            high, dual, power = math.log1p(high), math.log(dual), 0.0
        return Bounds(low, high, dual, power)

    def check(self) -> None:
        """Raises ValueError naming every bad keyword, its value and what is allowed."""
        problems = [*_unknown_modes(self), *_bad_numbers(self)]
        if problems:
            raise ValueError("; ".join(problems))

    def require_global_counts(self, cp_group: object | None, batch_num_tokens: int | torch.Tensor | None) -> None:
        """Raises ValueError where a rank of a context-parallel group would divide by its own tokens only."""
        if cp_group is not None and self.loss_agg_mode == "token-mean" and batch_num_tokens is None:
            raise ValueError("batch_num_tokens: with cp_group, token-mean needs the loss tokens of the whole batch")

    def inverse_denominator(
        self,
        batch_num_tokens: int | torch.Tensor | None,
        global_batch_size: int | torch.Tensor | None,
        batch: PackedTokens,
    ) -> float | torch.Tensor | None:
        """1/T, 1/N or 1/(N L) by aggregation mode: a float where the counts are host numbers, else a 0-d tensor.

        Sequences are counted in `batch` where they are None. None: T, the loss tokens, is not counted yet.
        """
        if self.loss_agg_mode == "token-mean":
            return None if batch_num_tokens is None else _inverse(batch_num_tokens, 1.0)
        count = batch.segments if global_batch_size is None else global_batch_size
        return _inverse(count, self.loss_scale_factor if self.loss_agg_mode == "seq-mean-token-sum" else 1.0)


def inverse_of_loss_tokens(batch: PackedTokens) -> torch.Tensor:
    """1/T of a batch, float64 scalar. Eight launches on a device; the kernels of a whole batch count T themselves."""
    return torch.as_tensor(_inverse(batch.trained.sum(), 1.0))


def _inverse(count: int | torch.Tensor, factor: float) -> float | torch.Tensor:
    if isinstance(count, torch.Tensor):
        return 1.0 / (count.clamp(min=1).to(torch.float64) * factor)
    return 1.0 / (max(count, 1) * factor)


def _dual(given: LossSpec) -> float:
    return math.inf if given.clip_c is None or given.clip_c < 0 else given.clip_c


def _unknown_modes(given: LossSpec) -> Iterator[str]:
    for name, known in (("ratio_mode", RATIO_MODES), ("clip_mode", CLIP_MODES), ("loss_agg_mode", LOSS_AGG_MODES)):
        value = getattr(given, name)
        if value not in known:
            nearest = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
            yield f"{name}: unknown {value!r}; did you mean {nearest!r}? Known: {', '.join(known)}"


def _bad_numbers(given: LossSpec) -> Iterator[str]:
    for name in ("clip_low", "clip_high", "clip_power", "loss_scale_factor"):
        value = getattr(given, name)
        if not math.isfinite(value):
            yield f"{name}: must be a finite number; got {value!r}"
        elif name in ("clip_low", "clip_high") and value < 0:
            yield f"{name}: must not be negative; got {value}"
    dual = _dual(given)
    if math.isnan(dual):
        yield "clip_c: must be a number, or None for no dual clip; got nan"
    if not given.loss_scale_factor > 0:
        yield f"loss_scale_factor: must be positive; got {given.loss_scale_factor}"
    if given.clip_mode != "log_power" and given.clip_low > 1:
        yield f"clip_low: 1 - clip_low bounds a ratio, which is never negative; got {given.clip_low}"
    if given.detached and dual < math.inf:
        yield f"clip_c: clip_mode 'detached_ratio' has no dual bound: pass None; got {given.clip_c}"
    if given.clip_mode == "ratio" and dual <= 1:
        yield f"clip_c: with clip_mode 'ratio' it bounds r itself and must exceed 1; got {given.clip_c}"
