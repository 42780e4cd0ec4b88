"""What is rehearsed of a transfer: how weights travel, what stays on the GPUs meanwhile, and over which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.config import Config
from tests.tracking.synthetic_run import make_config

MIB = 1 << 20
SCALE = 1024
"""How much larger the model is that the small one stands for; see `allocator.Gpu`."""
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 1984}
GPU_MIB, ENGINE_SHARE = 16, 0.25
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp2": {},
}
UPDATE, SENT, SAMPLING = "in an update", "while weights are sent", "while sampling"
"""Moments of a step, as the plan of the dry run names them."""


class _Eighth(int):
    """An eighth of a MiB, which no configuration file can say: `bucket_mib`, which is shifted to bytes."""

    def __lshift__(self, bits: int) -> int:
        return 1 << bits - 3


@dataclass(frozen=True)
class TransferCase:
    transport: str
    offload: str
    overlap: bool
    layout: str

    @property
    def name(self) -> str:
        overlap = ("overlap",) if self.overlap else ()
        return "-".join((self.transport, self.offload, *overlap, self.layout))

    def config(self, model: Path, root: Path) -> Config:
        """Of a run with these choices."""
        shared = self.transport == "ipc"
        config = make_config(
            root,
            model={"path": str(model)},
            policy={
                "timeout_minutes": 2.0,
                "dtype": "bfloat16",
                "micro_batch_tokens": 256,
                "head_chunk_tokens": 64,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": self.overlap,
                "overlap_param_gather": self.overlap,
                "offload": self.offload,
                **LAYOUTS[self.layout],
            },
            placement={
                "mode": "colocated" if shared else "disaggregated",
                "trainer_gpus": 2,
                "engine_gpus": 2 if shared else 1,
            },
            rollout={"engine": {"gpu_memory_utilization": ENGINE_SHARE}, "weights": {"transport": self.transport}},
        )
        weights = config.rollout.weights.model_copy(update={"bucket_mib": _Eighth()})
        return config.model_copy(update={"rollout": config.rollout.model_copy(update={"weights": weights})})


CASES = tuple(
    TransferCase(transport, offload, overlap, layout)
    for transport in ("ipc", "nccl")
    for offload in ("none", "all")
    for overlap in (True, False)
    for layout in LAYOUTS
)

FAST = (TransferCase("ipc", "none", True, "dp2"),)
"""In the usual suite."""
