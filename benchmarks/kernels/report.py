"""What every result file carries: where and with what it was measured, and tables for people."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("triton", "liger-kernel", "quack-kernels", "verl", "megatron-core")


def environment(device: str, threads: int | None = None) -> dict[str, Any]:
    """Device, versions, commit and time (UTC) of a measurement."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    found: dict[str, Any] = {"device": device_name(device), "versions": versions, "commit": commit()}
    found["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if device == "cuda":
        found["versions"]["cuda"] = torch.version.cuda
    if threads is not None:
        found["threads"] = threads
    return found


def device_name(device: str) -> str:
    """The accelerator's name, or the processor's with the number of cores at hand."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


def commit() -> str:
    """The checked-out commit, with "+" if tracked files differ from it; "unknown" outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=here, check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.returncode else "")


def describe(found: dict[str, Any]) -> str:
    """`environment` as one paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    threads = f", {found['threads']} threads" if "threads" in found else ""
    return f"{found['device']}{threads}; {versions}; commit {found['commit']}; {found['date']}."


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose columns line up in plain text too."""
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
