"""GPUs and their driver, and whether ranks reach each other.

Only child processes import torch, but for `torch_has_cuda` and `visible_gpus`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from ctpo_megatron.base.installed import TE, is_installed, te_trouble
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight.check import Gpu, MachineContext
from ctpo_megatron.preflight.packages import engine_of_cuda, version_of
from ctpo_megatron.preflight.timeouts import GPU_QUERY_TIMEOUT_S, MEET_TIMEOUT_S

_QUERY = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
"""First driver branch of each major version of CUDA (NVIDIA, CUDA Compatibility, "minor version compatibility")."""
_ELEMENTS = 1 << 22
"""Of float32 in the exchange that is timed."""
_RANK = """
import sys
from ctpo_megatron.preflight.devices import meet
print(meet(*sys.argv[1:3], *map(int, sys.argv[3:])))
"""


_OF_OTHERS = ("TORCHELASTIC_", "NCCL_DEBUG")
"""Variables that make a rank look for the store of torchrun, or NCCL write elsewhere or less."""
_INTERFACES = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface (interface of a cluster file)"


def gpus() -> list[Gpu] | str:
    """The GPUs of this node; a text says why they are unknown."""
    if (program := shutil.which("nvidia-smi")) is None:
        return "no nvidia-smi"
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    if done.returncode:
        return f"nvidia-smi: {(done.stdout + done.stderr).strip().splitlines()[-1:] or done.returncode}"
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [Gpu(name, float(mib) / 1024, driver) for name, mib, driver in rows]


def check_devices(context: MachineContext) -> Iterator[Problem]:
    """GPUs, their driver, and which layers and optimizer follow from what is installed."""
    found, cuda = context.gpus, context.cuda
    if isinstance(found, str) or not found:
        so = "" if engine_of_cuda() or driver_shows_device() else ": everything runs on the CPU"
        yield Problem("CUDA", f"none ({found or 'no GPU'}){so}", severity="warning")
    else:
        yield passed("CUDA", ", ".join(f"{gpu.name} {gpu.gib:.0f} GiB" for gpu in found))
        yield _driver(found[0].driver, cuda)
    engine = context.gpu_count > 0 and cuda is not None and is_installed(TE) and not te_trouble()
    apex = is_installed("apex") and is_installed("amp_C")
    layers = "Transformer Engine" if engine else "local (torch scaled_dot_product_attention)"
    optimizer = "Transformer Engine FusedAdam" if engine else "apex FusedAdam" if apex else "torch.optim.AdamW"
    if is_installed("torch"):  # without it `check_packages` says what to install
        yield passed("layer spec", layers)
        yield passed("optimizer", optimizer)


def torch_cuda() -> str | None:
    """The version of CUDA that torch was built for, from its file of versions."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return _built_for(Path(spec.submodule_search_locations[0]) / "version.py")


def _built_for(version_file: Path) -> str | None:
    """`cuda: Optional[str] = '12.8'` in a CUDA build of torch, `= None` elsewhere."""
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def has_cuda_device() -> bool:
    """Whether torch is built for CUDA and the driver shows a device (`CUDA_VISIBLE_DEVICES` counts)."""
    return torch_cuda() is not None and driver_shows_device()


def torch_has_cuda() -> bool:
    """Whether torch has CUDA; imports torch (2 CPU-seconds), as `has_cuda_device` does not. False without torch."""
    if not is_installed("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def visible_gpus() -> int:
    """GPUs that torch shows on this node; 0 without torch."""
    if not is_installed("torch"):
        return 0
    import torch

    return torch.cuda.device_count()


def driver_shows_device() -> bool:
    """Whether the driver shows this process a device (`CUDA_VISIBLE_DEVICES` counts)."""
    if (library := driver()) is None:
        return False
    count = ctypes.c_int()
    return library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def driver() -> ctypes.CDLL | None:
    """NVIDIA's driver as a library; None without."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _driver(driver: str, cuda: str | None) -> Problem:
    if cuda is None:
        fix = "install the CUDA build of torch and vLLM (docs/install_cuda.md), or train on the CPU"
        return Problem("driver", f"{driver}, but torch is a build without CUDA", fix, severity="warning")
    least = _LEAST_DRIVER.get(cuda.split(".")[0], 0)
    if int(driver.split(".")[0]) < least:
        fix = f"install a driver of branch {least} or newer"
        return Problem("driver", f"{driver} is too old for CUDA {cuda}, which torch was built for", fix)
    return passed("driver", f"{driver}, for CUDA {cuda}")


def check_collectives(context: MachineContext) -> list[Problem]:
    """Two ranks of this machine, or one for each of several GPUs, add tensors: over NCCL on GPUs, else over gloo."""
    if version_of("torch") is None:
        return []
    return [_exchange("nccl", context.gpu_count) if context.cuda and context.gpu_count > 1 else _exchange("gloo", 2)]


def _exchange(backend: str, ranks: int) -> Problem:
    problem, _ = exchange(f"127.0.0.1:{free_port()}", backend, range(ranks), ranks)
    return problem


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
    """A port that is currently free."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def meet(address: str, backend: str, rank: int, ranks: int) -> str:
    """What one rank of the self-test does; what it saw. Raises RuntimeError when the sum is wrong."""
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
