"""Weights over TCP from the ranks of a job, each of which sends its own; rank 0 receives and returns what arrived.

A scenario is {"family": ..., "policy": {...}}; with "namespaces", an engine fetches in each of these network namespaces
at once, from the ranks at "address".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, WeightOffer, open_transport, tcp_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import FetchMessage, fetched
from ctpo_megatron.policy import Trainer, init_distributed
from tests.policy.stepping import weights

_NETWORK = 0x40000000
"""CLONE_NEWNET of Linux."""


class Receiver:
    """Takes weights as the engines of an update do, and keeps them."""

    def __init__(self, engines: int = 1) -> None:
        self.engines = [f"engine {number}" for number in range(engines)]
        self.messages: list[dict[str, Any]] = []

    def tell(self, message: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
        self.messages = [message | each for each in own]

    def take(self, offer: WeightOffer, number: int = 0) -> dict[str, Any]:
        message = FetchMessage(**self.messages[number])
        arriving = Checksums(offer.version, torch.bfloat16)
        tensors = {name: tensor.clone() for name, tensor in arriving.watch(fetched(message))}
        return {
            "tensors": tensors,
            "sums agree": arriving.sums == offer.sums,
            "names": offer.names,
            "size": offer.size,
            "of ranks": [[tuple(entry) for entry in entries] for _, _, entries in message.shares],
        }

    def take_in(self, namespaces: Sequence[str], offer: WeightOffer) -> list[dict[str, Any]]:
        """What arrives in each network namespace."""

        def there(number: int) -> dict[str, Any]:
            with (Path("/run/netns") / namespaces[number]).open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):  # of this thread alone
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return self.take(offer, number)

        with ThreadPoolExecutor(len(namespaces)) as pool:
            return list(pool.map(there, range(len(namespaces))))


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = PolicyConfig(timeout_minutes=2.0, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    policy = Trainer(config, layout, model, temperature=1.0)
    facts = EngineFacts(torch.bfloat16, settings.get("address", "127.0.0.1"), "tcp")
    transport = open_transport(layout, facts, TransportSettings(20_000, 60.0))
    namespaces = settings.get("namespaces", [])
    found: dict[str, Any] = {}
    for version in (1, 2):
        sent = list[int]()
        offer, receiver = transport.offer(policy, version), Receiver(len(namespaces) or 1)
        update: Any = receiver
        offer.begin(update)
        offer.transfer()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tcp_transport, "_send", counted(sent, tcp_transport._send))
            if layout.is_rank_zero:
                found = receiver.take_in(namespaces, offer)[-1] if namespaces else receiver.take(offer)
            layout.wait_for_ranks()
        found["sent"] = layout.gather(sum(sent))
    transport.close()
    return found | {"whole": weights(policy), "declared": policy.weight_shapes()}


def counted(sent: list[int], send: Callable[..., None]) -> Callable[..., None]:
    """`send`, which adds to `sent` how many bytes it is given."""

    def counting(peer: Any, content: memoryview) -> None:
        sent.append(len(content))
        send(peer, content)

    return counting
