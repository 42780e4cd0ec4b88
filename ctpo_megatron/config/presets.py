"""Named objectives with their published numbers: the only list of preset names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

_PPO: dict[str, Any] = {"ratio_mode": "token", "clip_mode": "ratio", "clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}

PRESETS: dict[str, dict[str, Any]] = {
    "ctpo": {},
    "ctpo-fixed": {"clip_power": 0.0},
    "ctpo-geomean": {"ratio_mode": "geomean", "clip_power": -0.5},
    "grpo": _PPO,
    "dapo": {**_PPO, "clip_high": 0.28, "loss_agg_mode": "token-mean"},
    "gspo": {
        "ratio_mode": "sequence-geomean",
        "clip_mode": "ratio",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "clip_c": None,
    },
    # PPO's bounds on the product over the whole sequence: the high-variance end of the comparison.
    "sequence": {**_PPO, "ratio_mode": "sequence"},
}
"""Preset name -> fields that differ from the defaults of `PolicyObjective`."""

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]  # a type checker cannot read this; pydantic and the key table do
