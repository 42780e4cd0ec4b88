"""What `ctpo verify` can check: every preset, an entropy bonus with a loss of the kernels and of plain torch, turns."""

from __future__ import annotations

from typing import Any

from ctpo_megatron.objective import PRESETS, PolicyObjective

ENTROPY_COEF = 0.02


def _both(width: float) -> dict[str, Any]:
    return {"clip_low": width, "clip_high": width}


MET: dict[str, dict[str, Any]] = {
    "gmpo": _both(0.05),
    "dppo-tv": _both(5e-5),
    "dppo-kl": _both(2e-6),
    "cppo": _both(1e-4) | {"prefix_budget": 3e-5},
    "trm-k3": {"clip_high": 0.0016, "clip_c": 0.0034},
}
"""Narrower bounds than the preset's, where the small probabilities and differences of the batch would not meet them."""

OBJECTIVES = {name: PolicyObjective.preset(name, **MET.get(name, {})) for name in PRESETS} | {
    f"{name}+entropy": PolicyObjective.preset(name, entropy_coef=ENTROPY_COEF) for name in ("ctpo", "sapo")
}
_BY_TURN = {
    "ctpo+turns": PolicyObjective.preset("ctpo"),
    "sapo+turns": PolicyObjective.preset("sapo"),
    "ctpo+turn-end": PolicyObjective.preset("ctpo", turn_ratio="turn-end", clip_c=0.004, **_both(0.01)),
    "ctpo-fixed+turn-end": PolicyObjective.preset(
        "ctpo-fixed", turn_ratio="turn-end", entropy_coef=ENTROPY_COEF, **_both(0.05)
    ),
}
OBJECTIVES |= _BY_TURN
"""Objectives by name."""


def is_by_turn(name: str) -> bool:
    """Whether an objective is checked with an advantage for each turn."""
    return name in _BY_TURN
