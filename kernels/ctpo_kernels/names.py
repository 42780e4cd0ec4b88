"""The names of the ratio, clip and aggregation modes. Needs no torch."""

from __future__ import annotations

from typing import Literal, get_args

RatioMode = Literal["cumprod", "geomean", "token", "sequence", "sequence-geomean"]
KernelClipMode = Literal["log_power", "ratio", "detached_ratio"]
LossAggMode = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]

RATIO_MODES: tuple[RatioMode, ...] = get_args(RatioMode)
CLIP_MODES: tuple[KernelClipMode, ...] = get_args(KernelClipMode)
LOSS_AGG_MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)
