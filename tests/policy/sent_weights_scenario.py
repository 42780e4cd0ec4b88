"""Weights over TCP from the first rank of each pipeline stage of a job; rank 0 receives and returns what arrived.

A scenario is {"family": ..., "policy": {...}}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.engines.weights import EngineFacts, Manifest, TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import FetchMessage, fetched
from ctpo_megatron.policy import Trainer, init_distributed
from tests.policy.stepping import weights


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = PolicyConfig(timeout_minutes=2.0, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    policy = Trainer(config, layout, model, temperature=1.0)
    facts, declared = EngineFacts(torch.bfloat16, "127.0.0.1", "tcp"), policy.weight_shapes()
    transport = open_transport(layout, facts, TransportSettings(20_000, 60.0), Manifest(declared), None)
    found: dict[str, Any] = {}
    for version in (1, 2):
        message = FetchMessage(**transport.announce(version) or {})
        sums = transport.send(policy.weights(own_stage=transport.by_stage), version)
        if layout.is_rank_zero:
            received = Checksums()
            tensors = {name: tensor.clone() for name, tensor in received.watch(fetched(message))}
            found = {"tensors": tensors, "sums agree": received.sums() == sums, "servers": len(message.servers)}
        layout.wait_for_ranks()
    transport.close()
    return found | {"whole": weights(policy), "declared": declared}
