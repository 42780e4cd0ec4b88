"""What `ctpo verify` can check: layouts, with their policy settings and ranks, and objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.config import PrefixBudget
from ctpo_megatron.objective import PRESETS, PolicyObjective
from ctpo_megatron.verify.batch import LONGEST

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTOPT = {"use_distributed_optimizer": True}
MICRO = {"micro_batch_tokens": 96}
REPLAY = {"router_replay": True}
FULL = {"recompute": "full"}


PADDED = {"pad_to_multiple": LONGEST, "micro_batch_tokens": 4 * LONGEST}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class LayoutCase:
    """policy: fields of `PolicyConfig`. replicas: data-parallel size. experts: for a mixture of experts instead of a
    dense model."""

    name: str
    policy: dict[str, Any]
    replicas: int = 1
    experts: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes."""
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return self.replicas * math.prod(int(self.policy.get(size, 1)) for size in sizes)

    @property
    def replays(self) -> bool:
        """Whether every token has recorded experts, drawn at random, which the oracle takes as well."""
        return bool(self.policy.get("router_replay"))


LAYOUTS: dict[str, LayoutCase] = {
    layout.name: layout
    for layout in (
        LayoutCase("one", {}),
        LayoutCase("one-micro", {"micro_batch_tokens": 96}),
        LayoutCase("one-logits", {"head": "logits"}),
        LayoutCase("one-recompute", {"recompute": "full"}),
        LayoutCase("one-selective", {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}),
        LayoutCase("one-padded", PADDED),
        LayoutCase("tp2", TP2),
        LayoutCase("tp2-sp", TP2 | SP),
        LayoutCase("tp2-sp-micro", TP2 | SP | {"micro_batch_tokens": 96}),
        LayoutCase("pp2", PP2),
        LayoutCase("pp2-micro", PP2 | {"micro_batch_tokens": 96}),
        LayoutCase("vpp2", VPP2),
        LayoutCase("vpp2-micro", VPP2 | {"micro_batch_tokens": 96}),
        LayoutCase("cp2", CP2),
        LayoutCase("cp2-micro", CP2 | {"micro_batch_tokens": 48}),
        LayoutCase("cp2-padded", CP2 | PADDED),
        LayoutCase("cp2-logits", CP2 | {"head": "logits"}),
        LayoutCase("dp2", {}, replicas=2),
        LayoutCase("dp2-distopt", DISTOPT, replicas=2),
        LayoutCase("dp2-distopt-overlap", DISTOPT | OVERLAP, replicas=2),
        LayoutCase("tp2-pp2", TP2 | PP2),
        LayoutCase("tp2-sp-cp2", TP2 | SP | CP2),
        LayoutCase("vpp2-dp2-distopt-overlap", VPP2 | DISTOPT | OVERLAP, replicas=2),
        LayoutCase("cp2-vpp2", CP2 | VPP2),
        LayoutCase("cp2-dp2-distopt", CP2 | DISTOPT, replicas=2),
        LayoutCase("cp4", {"context_parallel_size": 4}),
        LayoutCase("tp2-sp-dp2", TP2 | SP, replicas=2),
        LayoutCase("pp2-dp2-distopt", PP2 | DISTOPT, replicas=2),
        LayoutCase("moe", {}, experts=True),
        LayoutCase("moe-ep2", EP2, replicas=2, experts=True),
        LayoutCase("moe-ep2-micro", EP2 | {"micro_batch_tokens": 96}, replicas=2, experts=True),
        LayoutCase("moe-ep2-distopt", EP2 | DISTOPT, replicas=2, experts=True),
        LayoutCase("moe-tp2-sp", TP2 | SP, experts=True),
        LayoutCase(
            "moe-recompute", {"recompute": "selective", "recompute_modules": ("core_attn", "moe")}, experts=True
        ),
        LayoutCase("moe-pp2", PP2, experts=True),
        LayoutCase("moe-cp2-ep2", CP2 | EP2, experts=True),
        LayoutCase("moe-tp2-sp-ep2", TP2 | SP | EP2, replicas=2, experts=True),
        LayoutCase("moe-vpp2-ep2", VPP2 | EP2, replicas=2, experts=True),
        LayoutCase("replay", REPLAY | MICRO, experts=True),
        LayoutCase("replay-full", REPLAY | MICRO | FULL, experts=True),
        LayoutCase(
            "replay-selective", REPLAY | MICRO | {"recompute": "selective", "recompute_modules": ("moe",)}, experts=True
        ),
        LayoutCase("replay-ep2", REPLAY | EP2 | MICRO, replicas=2, experts=True),
        LayoutCase("replay-tp2-sp", REPLAY | TP2 | SP | MICRO, experts=True),
        LayoutCase("replay-pp2-full", REPLAY | PP2 | MICRO | FULL, experts=True),
        LayoutCase("replay-vpp2-full", REPLAY | VPP2 | MICRO | FULL, experts=True),
        LayoutCase("replay-cp2-ep2", REPLAY | CP2 | EP2 | {"micro_batch_tokens": 48}, experts=True),
        LayoutCase("replay-tp2-sp-ep2-full", REPLAY | TP2 | SP | EP2 | MICRO | FULL, replicas=2, experts=True),
    )
}
"""All layouts by name. "micro": many small micro-batches instead of few large ones. "padded": every sequence padded to
the longest. "replay": in many small micro-batches, too; "full": with full recomputation."""


ENTROPY_COEF = 0.02


def _both(width: float) -> dict[str, Any]:
    return {"clip_low": width, "clip_high": width}


MET: dict[str, dict[str, Any]] = {
    "gmpo": _both(0.05),
    "dppo-tv": _both(5e-5),
    "dppo-kl": _both(2e-6),
    "cppo": _both(1e-4) | {"prefix_budget": 3e-5},
    "cppo-base": _both(1e-4) | {"prefix_budget": PrefixBudget(quantile=0.5, min=1e-5)},
    "trm-k3": {"clip_high": 0.0016, "clip_c": 0.0034},
    "dr-grpo-trl": {"loss_scale_factor": float(LONGEST)},
}
"""Narrower bounds than the preset's, where the small probabilities and differences of the batch would not meet them.

And the divisor that a configuration fills in.
"""

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
    """Return whether an objective is checked with an advantage for each turn."""
    return name in _BY_TURN
