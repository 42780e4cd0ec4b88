"""What metadata cannot tell, tried in child processes: does everything import, and do ranks reach each other?"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from ctpo_megatron.config import Problem, passed
from ctpo_megatron.doctor.packages import PACKAGES, version_of

_IMPORT_S = 300.0
_MEET_S = 120.0
_ELEMENTS = 1 << 22
"""Of float32 in the exchange that is timed."""
_PROBE = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        found[name] = ""
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(found))
"""
_RANK = "import sys; from ctpo_megatron.doctor.deep import meet; print(meet(*sys.argv[1:3], *map(int, sys.argv[3:])))"


def check_imports() -> list[Problem]:
    """A finding for each package that is installed and does not import; vLLM is left out: it takes ten seconds."""
    modules = {module: name for name, (module, _) in PACKAGES.items() if version_of(name) is not None}
    broken = [
        Problem(modules[module], f"{version_of(modules[module])} does not import: {trouble}", "install it anew")
        for module, trouble in import_troubles(list(modules)).items()
        if trouble
    ]
    return broken or [passed("imports", f"all {len(modules)} packages import")]


def import_troubles(modules: Sequence[str]) -> dict[str, str]:
    """Why each module does not import; empty if it does."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, *modules], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
        found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return dict.fromkeys(modules, f"not within {_IMPORT_S:g} s")
    except (IndexError, json.JSONDecodeError):  # an import killed the child
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return dict.fromkeys(modules, f"the interpreter died: {reason}")
    return found


def check_collectives(gpus: int) -> Problem:
    """Two ranks of this machine, or one for each of several GPUs, add tensors: over NCCL on GPUs, else over gloo."""
    backend, ranks = ("nccl", gpus) if gpus > 1 else ("gloo", 2)
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
    until = time.monotonic() + _MEET_S
    try:
        outputs = [process.communicate(timeout=max(0.0, until - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        fix = "NCCL_DEBUG=INFO says more; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
        return Problem(backend, f"{ranks} ranks did not meet within {_MEET_S:g} s", fix)
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
    """A port that nobody listened at just now."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def meet(address: str, backend: str, rank: int, ranks: int) -> str:
    """What one rank of the self-test does; what it saw. Raises RuntimeError when the sum is wrong."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = "cuda" if backend == "nccl" else "cpu"
    limit = timedelta(seconds=_MEET_S)
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
