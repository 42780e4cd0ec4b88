"""Named objectives with their published numbers: the only list of preset names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

_PPO: dict[str, Any] = {"ratio_mode": "token", "clip_mode": "ratio", "clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}

PRESETS: dict[str, dict[str, Any]] = {
    # As in the authors' code; the objective in the paper has no dual bound.
    "ctpo": {},
    "ctpo-paper": {"clip_c": None},
    "ctpo-uniform": {"clip_power": 0.0},
    # The ablation with the ratio window [0.5, 5] of the paper's first figure. That it had no dual bound is inferred.
    "ctpo-fixed": {"clip_mode": "ratio", "clip_low": 0.5, "clip_high": 4.0, "clip_c": None},
    "ctpo-geomean": {"ratio_mode": "geomean", "clip_power": -0.5},
    "grpo": _PPO,
    "dr-grpo": {**_PPO, "clip_c": None, "loss_agg_mode": "seq-mean-token-sum"},
    "dapo": {**_PPO, "clip_high": 0.28, "loss_agg_mode": "token-mean"},
    "gspo": {
        "ratio_mode": "sequence-geomean",
        "clip_mode": "ratio",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "clip_c": None,
    },
    # No lower bound, as published. The upper bound was not published; others found a ratio of 5 to work.
    "cispo": {
        "ratio_mode": "token",
        "clip_mode": "detached_ratio",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "clip_c": None,
        "loss_agg_mode": "token-mean",
    },
    # PPO's bounds on the product over the whole sequence: the high-variance end of the comparison.
    "sequence": {**_PPO, "ratio_mode": "sequence"},
}
"""Preset name -> fields that differ from the defaults of `PolicyObjective`."""

WITHOUT_STD = frozenset({"dr-grpo"})
"""Presets whose advantages are not divided by the standard deviation of the group, unless the configuration says so."""

ClipMode = Literal["log_power", "ratio", "detached_ratio"]
"""The clip modes of the kernels, and one that needs given log-probs."""

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]  # opaque to a type checker, but not to pydantic and the key table
