"""Whether ranks reach each other, tried in child processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight.check import MachineContext
from ctpo_megatron.preflight.packages import version_of
from ctpo_megatron.preflight.timeouts import MEET_TIMEOUT_S

_ELEMENTS = 1 << 22
"""Of float32 in the exchange that is timed."""
_RANK = """
import sys
from ctpo_megatron.preflight.collectives import meet
print(meet(*sys.argv[1:3], *map(int, sys.argv[3:])))
"""


def check_collectives(context: MachineContext) -> list[Problem]:
    """Two ranks of this machine, or one for each of several GPUs, add tensors: over NCCL on GPUs, else over gloo."""
    if version_of("torch") is None:
        return []
    return [_exchange("nccl", context.gpu_count) if context.cuda and context.gpu_count > 1 else _exchange("gloo", 2)]


def _exchange(backend: str, ranks: int) -> Problem:
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, address, backend, str(rank), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    until = time.monotonic() + MEET_TIMEOUT_S
    try:
        outputs = [process.communicate(timeout=max(0.0, until - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        fix = "NCCL_DEBUG=INFO says more; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
        return Problem(backend, f"{ranks} ranks did not meet within {MEET_TIMEOUT_S:g} s", fix)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, err)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode:
            reason = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            return Problem(backend, f"rank {rank} of {ranks}: {reason}")
    return passed(backend, f"{ranks} ranks: {outputs[0][0].strip()}")


def free_port() -> int:
    """A port that is currently free."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def meet(address: str, backend: str, rank: int, ranks: int) -> str:
    """What one rank of the self-test does; what it saw. Raises RuntimeError when the sum is wrong."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
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
