"""What is rehearsed: every pair of values of two of the choices that a policy on a GPU leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.rehearsal.synchronizations import Synchronization


@dataclass(frozen=True)
class Case:
    """adam: see `fused_adam.install`. layout: sizes of the parallel layout, as keys of `policy`.

    te_layers: of Transformer Engine, with stand-ins for its attention and rotation (`tests/policy/te_layers.py`).

    quick: part of `make test`, where each value of each choice is met once; all are part of `make test-slow`.

    Memory is given back and taken again (`policy.offload`) where 16 bits meet the distributed optimizer.
    """

    adam: str
    ranks: int
    family: str
    dtype: str
    head: str
    distributed: bool
    layout: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    te_layers: bool = False

    @property
    def name(self) -> str:
        how = "-".join(key.split("_")[0] for key in self.layout) or "data"
        options = ("distributed" if self.distributed else "", "te-layers" if self.te_layers else "")
        parts = (self.family, self.dtype, self.head, self.adam, *options)
        return "-".join(filter(None, (*parts, f"{self.ranks}-ranks-{how}" if self.ranks > 1 else "")))


@dataclass(frozen=True)
class Report:
    """Of one rank. passes: micro-batches of each pass, or forward and backward pass, of a phase."""

    counts: Counter[Synchronization]
    passes: dict[str, list[int]]


TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
REPLAY = {"router_replay": True}
DENSE, MIXTURE = "qwen3-tied", "qwen3-moe"

CASES = (
    Case("torch", 1, MIXTURE, "float32", "logits", True, quick=True),
    Case("transformer_engine", 2, DENSE, "float32", "logits", True),
    Case("apex", 2, MIXTURE, "float32", "logits", False, EXPERTS | REPLAY),
    Case("apex", 1, DENSE, "float32", "streaming", True),
    Case("transformer_engine", 1, MIXTURE, "bfloat16", "streaming", False, REPLAY),
    Case("apex", 1, MIXTURE, "bfloat16", "logits", True),
    Case("torch", 2, DENSE, "bfloat16", "streaming", False, TENSOR),
    Case("apex", 1, MIXTURE, "float16", "logits", False, quick=True),
    Case("torch", 2, MIXTURE, "float16", "streaming", False, EXPERTS),
    Case("transformer_engine", 2, DENSE, "float16", "streaming", True, TENSOR),
    # Beyond pairs: what README recommends for eight GPUs, and sequences that are cut over ranks.
    Case("transformer_engine", 2, DENSE, "bfloat16", "streaming", True, CONTEXT, quick=True),
    # Whole sequences around the attention of rows that are computed once.
    Case("transformer_engine", 2, DENSE, "bfloat16", "streaming", True, TENSOR, quick=True, te_layers=True),
    Case("transformer_engine", 2, MIXTURE, "bfloat16", "streaming", False, EXPERTS, te_layers=True),
)
