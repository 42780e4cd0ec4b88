"""`ctpo launch --check` in the ranks of a job: findings of all its nodes, and an all-reduce between all its ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ctpo_megatron.base.addresses import address_toward
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight.devices import exchange, free_port, has_cuda_device
from ctpo_megatron.preflight.nodes import compare_versions
from ctpo_megatron.preflight.timeouts import FINDINGS_TIMEOUT_S, LEAVE_TIMEOUT_S, MEET_TIMEOUT_S

BETWEEN = "all nodes"
_CHANNEL = re.compile(r" via (NET/[^/\n]+|P2P|SHM)")
_NETWORK = re.compile(r"Using network (\S.*)")
_WITHIN = ("P2P", "SHM", "NVLS")


class RankCheck:
    """This process as a rank of a job, from torchrun's variables; the ranks talk through the store of torchrun."""

    def __init__(self) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.ranks, self.node, self.nodes, self.local_rank, self.local_ranks = (
            int(os.environ[name])
            for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=FINDINGS_TIMEOUT_S)))
        self._store: Any = PrefixStore("check", store)

    def run(self, findings: Callable[[], list[Problem]]) -> tuple[dict[str, list[Problem]], bool]:
        """Findings by node and between them (of rank 0, else empty), and whether the job could train.

        findings: of this node; called on its first rank. Every wait has a deadline: who is late is a finding.
        """
        if self.local_rank == 0:
            self._tell(f"node{self.node}", findings(), host=socket.gethostname())
        if self.rank != 0:
            self._meet()
            return {}, self._verdict()
        found, complete = self._of_nodes()
        self._tell("address", [], host=f"{os.environ['MASTER_ADDR']}:{free_port()}" if complete else "")
        self._meet()
        found[BETWEEN] = [*compare_versions(found), *(self._of_ranks() if complete else [])]
        ready = not any(problem.failed for part in found.values() for problem in part)
        self._tell("verdict", [], host="ready" if ready else "not ready")
        self._see_off()
        return found, ready

    def _of_nodes(self) -> tuple[dict[str, list[Problem]], bool]:
        """Findings of every node, and whether all came: else some ranks would wait for others in vain."""
        until, complete = time.monotonic() + FINDINGS_TIMEOUT_S, True
        found = {}
        for node in range(self.nodes):
            told = self._hear(f"node{node}", until)
            complete = complete and told is not None
            lost = Problem("node", f"no findings after {FINDINGS_TIMEOUT_S:g} s", "see its output, and its load")
            found[f"node {node} ({told['host']})" if told else f"node {node}"] = told["problems"] if told else [lost]
        return found, complete

    def _meet(self) -> None:
        """Tell rank 0 what came of this rank's part in the all-reduce."""
        backend = "nccl" if has_cuda_device() else "gloo"
        told = self._hear("address", time.monotonic() + FINDINGS_TIMEOUT_S + MEET_TIMEOUT_S)
        if told is None or not told["host"]:
            return
        problem, log = exchange(told["host"], backend, [self.rank], self.ranks)
        name = os.environ.get("GLOO_SOCKET_IFNAME") or f"the way to {address_toward(os.environ['MASTER_ADDR'])}"
        took = sorted(nccl_transports(log)) if backend == "nccl" else [name]
        self._tell(f"rank{self.rank}", [problem], host=backend, took=took)

    def _of_ranks(self) -> list[Problem]:
        """The slowest word of all ranks on the all-reduce, and what carried it."""
        until = time.monotonic() + MEET_TIMEOUT_S
        names: set[str] = set()
        problems: list[Problem] = []
        backend = "gloo"
        for rank in range(self.ranks):
            told = self._hear(f"rank{rank}", until)
            if told is None:
                problems.append(Problem("all-reduce", f"rank {rank} did not end it within {MEET_TIMEOUT_S:g} s"))
                continue
            names, backend = names | set(told["took"]), told["host"]
            problems += [problem for problem in told["problems"] if problem.failed]
        if problems:
            return problems
        (first,) = self._hear("rank0", until)["problems"]
        gloo = passed("transport", f"gloo over {', '.join(sorted(names))}, on CPUs")
        carried = transport_finding(names, self.nodes) if backend == "nccl" else gloo
        return [replace(first, key=f"{backend} between ranks"), carried]

    def _verdict(self) -> bool:
        told = self._hear("verdict", time.monotonic() + FINDINGS_TIMEOUT_S + 2 * MEET_TIMEOUT_S)
        self._store.add("left", 1)
        return told is not None and told["host"] == "ready"

    def _see_off(self) -> None:
        """Rank 0 may hold the store: it stays until the others have read the verdict."""
        until = time.monotonic() + LEAVE_TIMEOUT_S
        while self._store.add("left", 0) < self.ranks - 1 and time.monotonic() < until:
            time.sleep(0.1)

    def _tell(self, key: str, problems: Sequence[Problem], *, host: str, took: Sequence[str] = ()) -> None:
        rows = [[each.key, each.message, each.fix, each.severity, each.extra] for each in problems]
        self._store.set(key, json.dumps({"host": host, "took": list(took), "problems": rows}))

    def _hear(self, key: str, until: float) -> Any:
        """The value that a rank has set; None when it has not come by then."""
        from torch.distributed import DistStoreError

        try:
            self._store.wait([key], timedelta(seconds=max(0.1, until - time.monotonic())))
        except DistStoreError:
            return None
        told = json.loads(self._store.get(key))
        rows = told["problems"]
        told["problems"] = [Problem(key, text, fix, severity=how, extra=extra) for key, text, fix, how, extra in rows]
        return told


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
