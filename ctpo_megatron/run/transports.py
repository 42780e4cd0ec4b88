"""Which transport carries the weights of this run: that of its engines, on every rank."""

from __future__ import annotations

import logging

from ctpo_megatron.config import Config
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
    fleet = None if services is None else services.fleet
    kind = layout.on_rank_zero(lambda: "file" if fleet is None else fleet.transport)
    if fleet is not None:
        log.info(
            "weights go to the engines by %s (rollout.weights.transport: %s)", kind, config.rollout.weights.transport
        )
    if kind == "file":
        return FileTransport(None if services is None else services.rollouts)
    if kind == "tcp":
        from ctpo_megatron.engines.weights.tcp_transport import TcpTransport

        return TcpTransport(layout, fleet, bucket_bytes=bucket_bytes, timeout_s=timeout_s, address=address)
    from ctpo_megatron.engines import WeightClient
    from ctpo_megatron.engines.weights.vllm import VllmTransport

    client = None if fleet is None else WeightClient(fleet, config.rollout.engine.tensor_parallel_size, timeout_s)
    return VllmTransport(
        layout, layout.rank, client, kind, bucket_bytes=bucket_bytes, timeout_s=timeout_s, address=address
    )
