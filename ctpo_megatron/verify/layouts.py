"""The matrix of layouts: what each sets in the policy's configuration, and how many ranks it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.verify.batch import LONGEST

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTOPT = {"use_distributed_optimizer": True}


PADDED = {"pad_to_multiple": LONGEST, "micro_batch_tokens": 4 * LONGEST}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class VerifyLayout:
    """policy: fields of `PolicyConfig`. replicas: data-parallel size. experts: for a mixture of experts, not for a
    dense model."""

    name: str
    policy: dict[str, Any]
    replicas: int = 1
    experts: bool = False

    @property
    def ranks(self) -> int:
        """Processes it runs on."""
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return self.replicas * math.prod(self.policy.get(size, 1) for size in sizes)


LAYOUTS: dict[str, VerifyLayout] = {
    layout.name: layout
    for layout in (
        VerifyLayout("one", {}),
        VerifyLayout("one-micro", {"micro_batch_tokens": 96}),
        VerifyLayout("one-logits", {"head": "logits"}),
        VerifyLayout("one-recompute", {"recompute": "full"}),
        VerifyLayout("one-selective", {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}),
        VerifyLayout("one-padded", PADDED),
        VerifyLayout("tp2", TP2),
        VerifyLayout("tp2-sp", TP2 | SP),
        VerifyLayout("tp2-sp-micro", TP2 | SP | {"micro_batch_tokens": 96}),
        VerifyLayout("pp2", PP2),
        VerifyLayout("pp2-micro", PP2 | {"micro_batch_tokens": 96}),
        VerifyLayout("vpp2", VPP2),
        VerifyLayout("vpp2-micro", VPP2 | {"micro_batch_tokens": 96}),
        VerifyLayout("cp2", CP2),
        VerifyLayout("cp2-micro", CP2 | {"micro_batch_tokens": 48}),
        VerifyLayout("cp2-padded", CP2 | PADDED),
        VerifyLayout("cp2-logits", CP2 | {"head": "logits"}),
        VerifyLayout("dp2", {}, replicas=2),
        VerifyLayout("dp2-distopt", DISTOPT, replicas=2),
        VerifyLayout("dp2-distopt-overlap", DISTOPT | OVERLAP, replicas=2),
        VerifyLayout("tp2-pp2", TP2 | PP2),
        VerifyLayout("tp2-sp-cp2", TP2 | SP | CP2),
        VerifyLayout("vpp2-dp2-distopt-overlap", VPP2 | DISTOPT | OVERLAP, replicas=2),
        VerifyLayout("cp2-vpp2", CP2 | VPP2),
        VerifyLayout("cp2-dp2-distopt", CP2 | DISTOPT, replicas=2),
        VerifyLayout("cp4", {"context_parallel_size": 4}),
        VerifyLayout("tp2-sp-dp2", TP2 | SP, replicas=2),
        VerifyLayout("pp2-dp2-distopt", PP2 | DISTOPT, replicas=2),
        VerifyLayout("moe", {}, experts=True),
        VerifyLayout("moe-ep2", EP2, replicas=2, experts=True),
        VerifyLayout("moe-ep2-micro", EP2 | {"micro_batch_tokens": 96}, replicas=2, experts=True),
        VerifyLayout("moe-ep2-distopt", EP2 | DISTOPT, replicas=2, experts=True),
        VerifyLayout("moe-tp2-sp", TP2 | SP, experts=True),
        VerifyLayout(
            "moe-recompute", {"recompute": "selective", "recompute_modules": ("core_attn", "moe")}, experts=True
        ),
        VerifyLayout("moe-pp2", PP2, experts=True),
        VerifyLayout("moe-cp2-ep2", CP2 | EP2, experts=True),
        VerifyLayout("moe-tp2-sp-ep2", TP2 | SP | EP2, replicas=2, experts=True),
        VerifyLayout("moe-vpp2-ep2", VPP2 | EP2, replicas=2, experts=True),
    )
}
"""All offered layouts by name. "micro": many small micro-batches instead of few large ones. "padded": every sequence
as long as the longest."""
