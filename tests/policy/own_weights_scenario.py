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
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, WeightOffer, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import FetchMessage, Share, fetched
from ctpo_megatron.policy import Trainer, destroy_distributed, init_distributed
from tests.policy.jobs import Results, Scenarios


class Receiver:
    """Takes weights as the engines of an update do, and keeps them."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}

    def tell(self, message: dict[str, Any]) -> None:
        self.message = message

    def take(self, offer: WeightOffer) -> dict[str, Any]:
        message = FetchMessage(**self.message)
        shares = [Share(*share) for share in message.shares]
        more = bytes.fromhex(message.secret), message.version, message.bucket_bytes, message.timeout_s
        arriving = Checksums(offer.version, torch.bfloat16)
        tensors = {name: tensor.clone() for name, tensor in arriving.watch(fetched(shares, *more))}
        return {
            "tensors": tensors,
            "sums agree": arriving.sums == offer.sums,
            "names": offer.names,
            "size": offer.size,
            "of ranks": [sorted(entry[0] for entry in share.entries) for share in shares],
        }


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = PolicyConfig(timeout_minutes=2.0, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    policy = Trainer(config, layout, model, temperature=1.0)
    facts = EngineFacts(torch.bfloat16, "127.0.0.1", "tcp")
    transport = open_transport(layout, facts, TransportSettings(20_000, 60.0))
    found: dict[str, Any] = {}
    for version in (1, 2):
        offer, receiver = transport.offer(policy, version), Receiver()
        update: Any = receiver
        offer.begin(update)
        offer.transfer()
        if layout.is_rank_zero:
            found = receiver.take(offer)
        layout.wait_for_ranks()
    whole = {name: tensor.clone() for name, tensor in policy.weights()}
    transport.close()
    declared = policy.weight_shapes()
    return found | {"whole": whole, "declared": declared}


def main(models_dir: Path, scenarios: Scenarios) -> Results | None:
    results = {}
    for name, settings in scenarios.items():
        results[name] = run(models_dir / settings["family"], settings)
        mpu.destroy_model_parallel()
    rank = dist.get_rank()
    destroy_distributed()
    return results if rank == 0 else None
