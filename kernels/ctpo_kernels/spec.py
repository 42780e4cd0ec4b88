"""The keywords of the loss, checked and reduced to the few numbers that kernels need."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ctpo_kernels.names import CLIP_MODES, LOSS_AGG_MODES, RATIO_MODES
from ctpo_kernels.packed import PackedTokens

D_LIMIT = 20.0
"""|log_probs_t - old_t| above this (nats) is cut before it enters a sum."""

LOG_RATIO_CAP = 10.0
"""log r_t above this (nats) is cut, and its gradient is zero."""

FRACTION_BITS = 40
"""S_t is summed in integer units of 2^-40 nats. |d| <= 20 takes 45 bits: 2^18 tokens at the limit fit into 64."""


@dataclass(frozen=True)
class LossSpec:
    """What a loss call computes, in the form in which kernels compare.

    ratio: one of `names.RATIO_MODES`. low, high, dual: bounds of log r_t in nats, times t^power; dual is inf where off.
    agg: one of `names.LOSS_AGG_MODES`; loss_scale_factor: the constant L that seq-mean-token-sum divides by.
    """

    ratio: str
    low: float
    high: float
    dual: float
    power: float
    agg: str
    loss_scale_factor: float

    @property
    def per_sequence(self) -> bool:
        """Whether a token's loss is divided by the number of loss tokens of its sequence."""
        return self.agg == "seq-mean-token-mean"

    @property
    def whole_sequence(self) -> bool:
        """Whether a token's ratio needs tokens after it."""
        return self.ratio in ("sequence", "sequence-geomean")

    def require_global_counts(self, cp_group: object | None, batch_num_tokens: int | torch.Tensor | None) -> None:
        """Raises ValueError where a rank of a context-parallel group would divide by its own tokens only."""
        if cp_group is not None and self.agg == "token-mean" and batch_num_tokens is None:
            raise ValueError("batch_num_tokens: with cp_group, token-mean needs the loss tokens of the whole batch")

    def inverse_denominator(
        self,
        batch_num_tokens: int | torch.Tensor | None,
        global_batch_size: int | torch.Tensor | None,
        batch: PackedTokens,
    ) -> float | torch.Tensor:
        """1/T, 1/N or 1/(N L) by aggregation mode: a float where the counts are host numbers, else a 0-d tensor.

        What is None is counted in `batch`.
        """
        if self.agg == "token-mean":
            count = batch.trained.sum() if batch_num_tokens is None else batch_num_tokens
        else:
            count = batch.segments if global_batch_size is None else global_batch_size
        factor = self.loss_scale_factor if self.agg == "seq-mean-token-sum" else 1.0
        if isinstance(count, torch.Tensor):
            return 1.0 / (count.clamp(min=1).to(torch.float64) * factor)
        return 1.0 / (max(count, 1) * factor)

    @classmethod
    def of(
        cls,
        *,
        clip_low: float,
        clip_high: float,
        clip_c: float | None,
        clip_power: float,
        clip_mode: str,
        ratio_mode: str,
        loss_agg_mode: str,
        loss_scale_factor: float,
    ) -> LossSpec:
        """Checked keywords. Bounds on the ratio itself become bounds on its logarithm, where kernels decide.

        Raises ValueError naming every bad keyword, its value and what is allowed.
        """
        problems = [
            f"{name}: unknown {value!r}; did you mean {_nearest(value, known)!r}? Known: {', '.join(known)}"
            for name, value, known in (
                ("ratio_mode", ratio_mode, RATIO_MODES),
                ("clip_mode", clip_mode, CLIP_MODES),
                ("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES),
            )
            if value not in known
        ]
        dual = math.inf if clip_c is None or clip_c < 0 else clip_c
        finite = {"clip_low": clip_low, "clip_high": clip_high, "clip_power": clip_power}
        finite |= {"loss_scale_factor": loss_scale_factor}
        problems += [
            f"{name}: must be a finite number; got {v!r}" for name, v in finite.items() if not math.isfinite(v)
        ]
        problems += [f"{name}: must not be negative; got {finite[name]}" for name in finite if _negative(name, finite)]
        if math.isnan(dual):
            problems.append("clip_c: must be a number, or None for no dual clip; got nan")
        if not loss_scale_factor > 0:
            problems.append(f"loss_scale_factor: must be positive; got {loss_scale_factor}")
        if clip_mode == "ratio":
            if clip_low > 1:
                problems.append(f"clip_low: 1 - clip_low bounds a ratio, which is never negative; got {clip_low}")
            if dual <= 1:
                problems.append(f"clip_c: with clip_mode 'ratio' it bounds r itself and must exceed 1; got {clip_c}")
        if problems:
            raise ValueError("; ".join(problems))
        if clip_mode == "ratio":
            clip_low = -math.log1p(-clip_low) if clip_low < 1 else math.inf
            clip_high, dual, clip_power = math.log1p(clip_high), math.log(dual), 0.0
        return cls(ratio_mode, clip_low, clip_high, dual, clip_power, loss_agg_mode, loss_scale_factor)


def _negative(name: str, values: dict[str, float]) -> bool:
    return name in ("clip_low", "clip_high") and values[name] < 0


def _nearest(value: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(str(value), list(known), n=1, cutoff=0.0)[0]
