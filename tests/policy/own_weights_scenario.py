"""Weights over TCP from the ranks of a job, each of which sends its own; rank 0 receives and returns what arrived.

A scenario is {"family": ..., "policy": {...}}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.engines.weights import EngineFacts, EngineWeights
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import Share, fetched
from ctpo_megatron.engines.weights.tcp_transport import TcpTransport
from ctpo_megatron.policy import Trainer, destroy_distributed, init_distributed
from tests.policy.jobs import Results, Scenarios


class Receiver:
    """Takes weights as an engine does, and keeps them."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.weights: EngineWeights | None = None

    def engine_facts(self) -> EngineFacts:
        return EngineFacts(torch.bfloat16, "127.0.0.1")

    def begin_update(self, weights: EngineWeights, began: float) -> None:
        self.weights = weights

    def finish_update(self) -> None:
        if (weights := self.weights) is None:
            return
        self.weights = None
        with weights.offered() as offer:
            shares = [Share(*share) for share in offer["shares"]]
            more = bytes.fromhex(offer["secret"]), offer["version"], offer["bucket_bytes"], offer["timeout_s"]
            arriving = Checksums(weights.version, torch.bfloat16)
            tensors = {name: tensor.clone() for name, tensor in arriving.watch(fetched(shares, *more))}
        self.found = {
            "tensors": tensors,
            "sums agree": arriving.sums == weights.sums,
            "names": weights.names,
            "size": weights.size,
            "of ranks": [sorted(entry[0] for entry in share.entries) for share in shares],
        }


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = PolicyConfig(timeout_minutes=2.0, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    policy = Trainer(config, layout, model, temperature=1.0)
    receiver = Receiver()
    transport = TcpTransport(layout, receiver if layout.is_rank_zero else None, bucket_bytes=20_000, timeout_s=60)
    transport.init()
    for version in (1, 2):
        transport.send(policy, version)
    if layout.is_rank_zero:
        receiver.finish_update()
    whole = {name: tensor.clone() for name, tensor in policy.weights()}
    transport.close()
    declared = policy.weight_shapes()
    return receiver.found | {"whole": whole, "declared": declared}


def main(models_dir: Path, scenarios: Scenarios) -> Results | None:
    results = {}
    for name, settings in scenarios.items():
        results[name] = run(models_dir / settings["family"], settings)
        mpu.destroy_model_parallel()
    rank = dist.get_rank()
    destroy_distributed()
    return results if rank == 0 else None
