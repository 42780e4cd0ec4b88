"""How wide the clip window is over a step's tokens, as the authors' code reports it (`la_*`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ctpo_megatron.config import PolicyObjective


def window_metrics(model_tokens: Sequence[int], objective: PolicyObjective | None) -> dict[str, float]:
    """Of the window [-low t^p, high t^p] on log r, with `clip_drift` around its centre, over all model tokens.

    model_tokens: number in each sequence; their positions t are 1, 2, ... Empty without tokens, and for a window of
    another kind (`clip_mode`). Source: `_compute_policy_loss_cum_token_la_impl` of horizon-llm/CTPO at acc4021.
    """
    lengths = np.asarray(model_tokens, np.int64)
    if objective is None or objective.clip_mode != "log_power" or not lengths.any():
        return {}
    longest = int(lengths.max())
    # As many tokens have position t as sequences have at least t tokens.
    count = np.bincount(lengths, minlength=longest + 1)[::-1].cumsum()[::-1][1:].astype(np.float64)
    positions = np.arange(1, longest + 1, dtype=np.float64)
    scale, centre = positions**objective.clip_power, -objective.clip_drift / 2 * positions
    middle = _median_position(count)
    metrics = {
        "pg_update/la_scale/mean": float(np.average(scale, weights=count)),
        "pg_update/la_scale/min": 1.0,
        "pg_update/la_scale/max": float(scale[-1]),
        "pg_update/la_scale/p50": float((scale[middle[0] - 1] + scale[middle[1] - 1]) / 2),
    }
    bounds = {"high": objective.clip_high, "low": -objective.clip_low, "c": objective.clip_c}
    for name, width in bounds.items():
        if width is not None and math.isfinite(width):
            ratio = np.exp(width * scale + centre)
            metrics[f"pg_update/la_clip_{name}_ratio/mean"] = float(np.average(ratio, weights=count))
    return metrics


def _median_position(count: np.ndarray) -> tuple[int, int]:
    """The positions of the two tokens in the middle, the same for an odd number."""
    total, before = int(count.sum()), np.cumsum(count)
    low, high = np.searchsorted(before, [(total + 1) // 2, total // 2 + 1]) + 1
    return int(low), int(high)
