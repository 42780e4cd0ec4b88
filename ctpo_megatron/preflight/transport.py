"""What carries tensors between ranks: what NCCL said that it took, or the interface of gloo."""

from __future__ import annotations

import re

from ctpo_megatron.config import Problem, passed

_CHANNEL = re.compile(r" via (NET/[^/\n]+|P2P|SHM)")
_NETWORK = re.compile(r"Using network (\S.*)")
_WITHIN = ("P2P", "SHM", "NVLS")


def nccl_transports(log: str) -> set[str]:
    """Names in what NCCL prints under NCCL_DEBUG=INFO: `NET/IB`, `NET/Socket`, `GDRDMA`, `P2P`, `SHM`, `NVLS`.

    A network counts where a channel takes it, and where no channel is named as the one that NCCL would use.
    """
    found = set(_CHANNEL.findall(log))
    if not found:
        found = {f"NET/{name.strip()}" for name in _NETWORK.findall(log)}
    if "/GDRDMA" in log:
        found.add("GDRDMA")
    if re.search(r"NVLS comm |Connected NVLS tree", log):
        found.add("NVLS")
    return found


def transport_finding(names: set[str], nodes: int) -> Problem:
    """What the ranks of some nodes took: TCP between nodes, and a way through the host's memory, are notes."""
    networks = sorted(name for name in names if name.startswith("NET/"))
    within = ", ".join(name for name in _WITHIN if name in names) or "nothing"
    if nodes == 1:
        return passed("transport", f"{within} within the node")
    if not networks:
        what = f"NCCL names no network ({within} within the nodes)"
        return Problem("transport", what, "NCCL_DEBUG=INFO says more", severity="warning")
    text = f"{', '.join(networks)} between the nodes, {within} within"
    if "NET/Socket" in networks:
        fix = "TCP is many times slower than InfiniBand or RoCE; where the nodes have it: docs/cluster.md#nccl"
        return Problem("transport", text, fix, severity="warning")
    if "GDRDMA" not in names:
        fix = "tensors pass the hosts' memory; for GPUDirect RDMA: docs/cluster.md#nccl"
        return Problem("transport", f"{text}, without GDRDMA", fix, severity="warning")
    return passed("transport", f"{text}, with GDRDMA")
