"""What is run in the first hour, in which order, and how long each stage may take."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SUITES = {"A": 420, "B": 300, "C": 540, "D": 300}
"""Kernel suites, and seconds for each: benchmarks/kernels."""
SANITIZED = "decide_as_the_twin_does and default or pieces_of_sequences or padding_columns or streaming_head"
"""Tests that launch every kernel."""
RECIPES = {"qwen3_0_6b": 240, "qwen3_1_7b": 240}
"""Models with a recipe for one GPU, and seconds for each."""
SANITIZER_WHEEL = "nvidia-cuda-sanitizer-api"
"""For CUDA 13; its program lies in `nvidia/cu13/bin`."""


@dataclass(frozen=True)
class Machine:
    """device: `cuda`, or `cpu` to see that the stages run. gpus: how many are visible. tag: names its files."""

    device: str
    gpus: int
    tag: str


@dataclass(frozen=True)
class Stage:
    """One command, with a limit of its own.

    figures: JSON file (of several lines, the last one) that the command writes, for the record. skip: why it cannot
    run here.
    """

    name: str
    purpose: str
    limit_s: float
    command: tuple[str, ...] = ()
    figures: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    skip: str = ""


def stages(machine: Machine, work: Path) -> list[Stage]:
    """All stages in the order in which they tell most; their files are written to `work`."""
    return [
        _doctor(),
        _gpu_tests(machine),
        *_policy(machine, work),
        *_sanitizer(machine),
        *_kernels(machine, work),
        *_engine_sync(machine, work),
        _quickstart(machine, work),
        _ranks(machine),
    ]


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def _ctpo(*arguments: str) -> tuple[str, ...]:
    return _python("-m", "ctpo_megatron.cli", *arguments)


def _doctor() -> Stage:
    return Stage("doctor", "versions, devices, what is missing", 300, _ctpo("doctor", "--deep"))


def _gpu_tests(machine: Machine) -> Stage:
    skip = "" if machine.device == "cuda" else "needs a CUDA device"
    return Stage("test-gpu", "the tests that need a GPU", 900, _python("-m", "pytest", "-m", "gpu", "-q"), skip=skip)


def _policy(machine: Machine, work: Path) -> Iterator[Stage]:
    for model, limit in RECIPES.items():
        out = work / f"policy-{model}.json"
        recipe = ("--recipe", f"configs/{model}_one_gpu.yaml", "--shapes", f"configs/models/{model}.json")
        size = () if machine.device == "cuda" else ("--trajectories", "12", "--updates", "3")
        command = _python("-m", "benchmarks.gpu_first_hour.policy", *recipe, *size, "--device", machine.device)
        purpose = f"optimizer steps of {model}: seconds and memory beside the plan"
        yield Stage(f"policy-{model}", purpose, limit, (*command, "--out", str(out)), out)


def _sanitizer(machine: Machine) -> Iterator[Stage]:
    """Races and bad addresses inside a thread block, which no interpreter shows; small shapes, they are slow."""
    tests = ("tests/gpu/test_kernels_cuda.py", "-m", "gpu", "-k", SANITIZED, "-q")
    program = compute_sanitizer()
    absent = "" if program else f"compute-sanitizer is not here: pip install {SANITIZER_WHEEL}"
    skip = absent if machine.device == "cuda" else "needs a CUDA device"
    for tool in ("memcheck", "racecheck"):
        command = (program or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *_python("-m", "pytest"))
        # Its cache would hide an access beyond a tensor that ends inside a larger block.
        plain = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        yield Stage(f"sanitizer-{tool}", f"compute-sanitizer {tool}", 420, (*command, *tests), None, plain, skip)


def compute_sanitizer() -> str | None:
    """The program: the one on the path, or else the one of the wheel in this environment; None without."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = (nvidia.submodule_search_locations or ()) if nvidia else ()
    of_wheel = [str(file) for folder in folders for file in sorted(Path(folder).glob("cu*/bin/compute-sanitizer"))]
    return next(filter(None, map(shutil.which, ["compute-sanitizer", *of_wheel])), None)


def _kernels(machine: Machine, work: Path) -> Iterator[Stage]:
    size = () if machine.device == "cuda" else ("--quick",)
    name = f"kernels-{machine.device}" + ("" if machine.device == "cuda" else "-quick")
    for suite, limit in SUITES.items():
        out = work / f"kernels-{suite}"
        options = (
            "--suite",
            suite,
            "--device",
            machine.device,
            *size,
            "--out",
            str(out),
            "--deadline",
            f"{limit - 60}",
        )
        command = _python("-m", "benchmarks.kernels", *options)
        yield Stage(f"kernels-{suite}", f"kernel suite {suite}", limit, command, out / f"{name}.json")


def _engine_sync(machine: Machine, work: Path) -> Iterator[Stage]:
    for runner in ("v1", "v2"):
        out = work / f"engine-{runner}.json"
        command = _python("-m", "benchmarks.gpu_first_hour.engine", "--runner", runner, "--out", str(out))
        skip = "vLLM has it on CUDA only" if runner == "v2" and machine.device != "cuda" else ""
        purpose = f"vLLM's model runner {runner}: weights in, log-probs out"
        yield Stage(f"engine-{runner}", purpose, 420, (*command, "--device", machine.device), out, skip=skip)


def _quickstart(machine: Machine, work: Path) -> Stage:
    run = work / "quickstart"
    settings = [f"run.root={run.parent}", f"run.name={run.name}", "run.overwrite=true", "run.steps=3"]
    settings += ["sft.steps=300", "checkpoint.every=0", "tracking.live=plain"]
    if machine.device == "cuda":  # rounding to bfloat16 moves log-probs by far more than the CPU's limit
        settings += ["policy.dtype=bfloat16", "rollout.engine.dtype=bfloat16", "rollout.mismatch_limit=null"]
        settings += ["rollout.engine.gpu_memory_utilization=0.3", "rollout.engine.kv_cache_mb=null"]
        settings += ["placement.mode=colocated"]  # the engine sleeps while the trainer works
    purpose = "the whole ring on one device, three steps"
    return Stage(
        "quickstart", purpose, 600, _ctpo("train", "configs/quickstart.yaml", *settings), run / "metrics.jsonl"
    )


def _ranks(machine: Machine) -> Stage:
    skip = "" if machine.device != "cuda" or machine.gpus > 1 else "needs two GPUs"
    # Products of float32 on tensor cores and other orders of summation: docs/policy.md has 1e-5 on CPUs.
    tolerance = "1e-5" if machine.device == "cpu" else "1e-3"
    command = _ctpo("verify", "--layouts", "tp2", "dp2", "--tolerance", tolerance)
    backend = "NCCL" if machine.device == "cuda" else "gloo"
    return Stage("two-ranks", f"TP 2 and DP 2 over {backend} against float64", 420, command, skip=skip)
