"""Which transport carries the weights of this run: that of its engines, on every rank."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import torch

from ctpo_megatron.config import Config
from ctpo_megatron.engines import EnginePool
from ctpo_megatron.engines.weights import FileTransport, WeightTransport
from ctpo_megatron.policy import Layout
from ctpo_megatron.run.services import Services

log = logging.getLogger(__name__)


def make_transport(layout: Layout, services: Services | None, config: Config) -> WeightTransport:
    """The transport of the engines, or for a recording one that takes the weights to nowhere; collective.

    Waits until the engines are up, for only then it is known where they are. services: None on ranks other than zero.
    """
    timeout_s, bucket_bytes = config.rollout.weights.timeout_s, config.rollout.weights.bucket_mib << 20
    address = config.cluster.node_address
    pool = None if services is None else services.pool
    kind = layout.on_rank_zero(lambda: "file" if pool is None else pool.transport)
    if pool is not None:
        log.info(
            "weights go to the engines by %s (rollout.weights.transport: %s)", kind, config.rollout.weights.transport
        )
    if kind == "file":
        return FileTransport(None if services is None else _Receiver(pool))
    if kind == "tcp":
        from ctpo_megatron.engines.weights.tcp_transport import TcpTransport

        return TcpTransport(layout, pool, bucket_bytes=bucket_bytes, timeout_s=timeout_s, address=address)
    from ctpo_megatron.engines import WeightClient
    from ctpo_megatron.engines.weights.vllm import VllmTransport

    client = None if pool is None else WeightClient(pool, config.rollout.engine.tensor_parallel_size, timeout_s)
    return VllmTransport(
        layout, layout.rank, client, kind, bucket_bytes=bucket_bytes, timeout_s=timeout_s, address=address
    )


class _Receiver:
    """Gives tensors to the pool. A replay has none: the tensors are consumed, so that all ranks gather them."""

    def __init__(self, pool: EnginePool | None) -> None:
        self._pool = pool

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self._pool is None:
            deque(named_tensors, maxlen=0)
        else:
            self._pool.begin_sync(named_tensors, version)
