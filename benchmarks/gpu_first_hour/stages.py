"""What is run in the first hour, in which order, and how long each stage may take."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from benchmarks.gpu_first_hour.overrides import on_device

SUITES = {"A": (150, 420), "B": (60, 300), "C": (240, 540), "D": (120, 300)}
"""Kernel suites, with the seconds that each is expected to take and those that it may take: benchmarks/kernels."""
SANITIZED = "decide_as_the_twin_does and default or pieces_of_sequences or padding_columns or streaming_head"
"""Tests that launch every kernel."""
RECIPES = {"qwen3_0_6b": (5120, 20480, 40960), "qwen3_1_7b": (10240, 20480, 40960)}
"""Models with a recipe for one GPU, and sizes of a micro-batch in tokens: the first holds the longest trajectory."""
CAP_GIB = 24
SANITIZER_WHEEL = "nvidia-cuda-sanitizer-api"
"""For CUDA 13; its program lies in `nvidia/cu13/bin`."""
NEEDS_CUDA = "needs a CUDA device"


@dataclass(frozen=True)
class Machine:
    """device: `cuda`, or `cpu` to see that the stages run. gpus: how many are visible. tag: names its files.

    model: of the quickstart, fine-tuned; None: the stages make one. overrides: of the configuration, for stages with
    an engine.
    """

    device: str
    gpus: int
    tag: str
    model: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def no_cuda(self) -> str:
        """Why a stage for GPUs is skipped here; empty on a GPU."""
        return "" if self.device == "cuda" else NEEDS_CUDA


@dataclass(frozen=True)
class Stage:
    """One command, with a limit of its own.

    figures: JSON file (of several lines, the last one) that the command writes, for the record. skip: why it cannot
    run here. expected_s: on an H100; with less time left it is not begun.
    """

    name: str
    purpose: str
    limit_s: float
    command: tuple[str, ...] = ()
    figures: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    skip: str = ""
    expected_s: float = 0.0


def stages(machine: Machine, work: Path) -> list[Stage]:
    """All stages in the order in which they tell most; their files are written to `work`."""
    kernels = {stage.name: stage for stage in _kernels(machine, work)}
    return [
        _pruned(machine, work),
        _engine_in_process(machine, work),
        *_engine_sync(machine, work),
        _quickstart(machine, work),
        _shapes(machine, work, "shapes", "with graphs"),
        *_sweep(machine, work),
        _cap(machine, work),
        kernels.pop("kernels-B"),
        kernels.pop("kernels-A"),
        _profile(machine, work),
        _doctor(),
        _gpu_tests(machine),
        *_recipes(machine, work),
        _shapes(machine, work, "shapes-eager", "without graphs", "rollout.engine.enforce_eager=true"),
        *_sanitizer(machine),
        *kernels.values(),
        _ranks(machine),
    ]


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def _ctpo(*arguments: str) -> tuple[str, ...]:
    return _python("-m", "ctpo_megatron.cli", *arguments)


def _program(name: str, machine: Machine, out: Path, *arguments: str) -> tuple[str, ...]:
    """A program of this folder."""
    common = ("--device", machine.device, "--out", str(out))
    return _python("-m", f"benchmarks.gpu_first_hour.{name}", *common, *arguments)


def _pruned(machine: Machine, work: Path) -> Stage:
    out = work / "pruned.json"
    purpose = "kernels of vLLM's library against torch"
    return Stage("pruned", purpose, 120, _program("pruned", machine, out), out, expected_s=20)


def _engine_in_process(machine: Machine, work: Path) -> Stage:
    name, out = "engine-in-process", work / "engine-in-process.json"
    command = _program("engine_in_process", machine, out, *_model(machine), *machine.overrides)
    purpose = "one engine without Ray: generate, sleep, weights from a second process, wake, generate"
    return Stage(name, purpose, 300, command, out, expected_s=75)


def _model(machine: Machine) -> tuple[str, ...]:
    return () if machine.model is None else ("--model", str(machine.model))


def _engine_sync(machine: Machine, work: Path) -> Iterator[Stage]:
    for runner in ("v1", "v2"):
        out = work / f"engine-{runner}.json"
        skip = "vLLM has it on CUDA only" if runner == "v2" and machine.device != "cuda" else ""
        command = _program("engine", machine, out, "--runner", runner, *_model(machine), *machine.overrides)
        purpose = f"vLLM's model runner {runner} in a Ray actor: weights in, log-probs out"
        yield Stage(f"engine-{runner}", purpose, 420, command, out, skip=skip, expected_s=50)


def _quickstart(machine: Machine, work: Path) -> Stage:
    run, task = work / "quickstart", work / "toolmath"
    settings = [f"data.train=[{task / 'train.parquet'}]", f"data.eval=[{task / 'heldout.parquet'}]"]
    settings += [f"run.root={run.parent}", f"run.name={run.name}", "run.overwrite=true", "run.steps=3"]
    settings += ["checkpoint.every=0", "tracking.live=plain", *on_device(machine.device)]
    if machine.model is None:
        settings += [f"model.path={task / 'model'}", f"sft.data=[{task / 'sft.parquet'}]", "sft.steps=300"]
    else:
        settings += [f"model.path={machine.model}", "sft=null"]
    if machine.device == "cuda":  # rounding to bfloat16 moves log-probs by far more than the CPU's limit
        settings += ["policy.dtype=bfloat16", "rollout.mismatch_limit=null", "tracking.report=false"]
    purpose = "the whole ring on one device, three steps"
    write = shlex.join(_python("-m", "examples.toolmath", str(task)))
    train = shlex.join(_ctpo("train", "configs/quickstart.yaml", *settings, *machine.overrides))
    command = ("sh", "-c", f"{write} && exec {train}")
    return Stage("quickstart", purpose, 600, command, run / "metrics.jsonl", expected_s=150)


def _shapes(machine: Machine, work: Path, name: str, how: str, *overrides: str) -> Stage:
    out = work / f"{name}.json"
    command = _program("shapes", machine, out, "--work", str(work / name), *overrides, *machine.overrides)
    purpose = f"the ring at the shapes of Qwen3-0.6B {how}, two steps"
    return Stage(name, purpose, 480, command, out, expected_s=150)


def _policy(machine: Machine, work: Path, name: str, model: str, purpose: str, *arguments: str) -> Stage:
    """Optimizer steps of a recipe; fewer and shorter ones on a CPU."""
    out = work / f"{name}.json"
    recipe = ("--recipe", f"configs/{model}_one_gpu.yaml", "--shapes", f"configs/models/{model}.json")
    size = () if machine.device == "cuda" else ("--trajectories", "12", "--updates", "3")
    command = _program("policy", machine, out, *recipe, *size, *arguments)
    return Stage(name, purpose, 240, command, out, expected_s=45)


def _sweep(machine: Machine, work: Path) -> Iterator[Stage]:
    for model, sizes in RECIPES.items():
        for tokens, recompute in product(sizes, ("full", "none")):
            name = f"policy-{model}-{tokens // 1024}k-{recompute}"
            purpose = f"optimizer steps of {model}, {tokens} tokens a micro-batch, recompute {recompute}"
            here = tokens if machine.device == "cuda" else tokens // 8
            overrides = (f"policy.micro_batch_tokens={here}", f"policy.recompute={recompute}")
            yield _policy(machine, work, name, model, purpose, *overrides)


def _recipes(machine: Machine, work: Path) -> Iterator[Stage]:
    for model in RECIPES:
        purpose = f"optimizer steps of {model} as its recipe says: seconds and memory beside the plan"
        yield _policy(machine, work, f"policy-{model}", model, purpose)


def _cap(machine: Machine, work: Path) -> Stage:
    purpose = f"the recipe for {CAP_GIB} GiB with no more memory than that"
    cap = ("--cap-gib", str(CAP_GIB))
    stage = _policy(machine, work, f"policy-{CAP_GIB}-gib", "qwen3_0_6b", purpose, *cap)
    return replace(stage, skip=machine.no_cuda)


def _profile(machine: Machine, work: Path) -> Stage:
    purpose = "one update under torch's profiler: launches a layer, copies, waits"
    stage = _policy(machine, work, "profile", "qwen3_0_6b", purpose, "--profile")
    return replace(stage, expected_s=60)


def _doctor() -> Stage:
    purpose = "versions, devices, what is missing (1: something is; of a bundle vl-convert, for charts)"
    return Stage("doctor", purpose, 300, _ctpo("doctor", "--deep"), expected_s=30)


def _gpu_tests(machine: Machine) -> Stage:
    command = _python("-m", "pytest", "-m", "gpu", "-q")
    return Stage("test-gpu", "the tests that need a GPU", 900, command, skip=machine.no_cuda, expected_s=90)


def _sanitizer(machine: Machine) -> Iterator[Stage]:
    """Races and bad addresses inside a thread block, which no interpreter shows; small shapes, they are slow."""
    tests = ("tests/gpu/test_kernels_cuda.py", "-m", "gpu", "-k", SANITIZED, "-q")
    program = compute_sanitizer()
    absent = "" if program else f"compute-sanitizer is not here: pip install {SANITIZER_WHEEL}"
    for tool in ("memcheck", "racecheck"):
        command = (program or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *_python("-m", "pytest"))
        # Its cache would hide an access beyond a tensor that ends inside a larger block.
        plain = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        skip, name = machine.no_cuda or absent, f"sanitizer-{tool}"
        yield Stage(name, f"compute-sanitizer {tool}", 420, (*command, *tests), None, plain, skip, expected_s=120)


def compute_sanitizer() -> str | None:
    """The program: the one on the path, or else the one of the wheel in this environment; None without."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = (nvidia.submodule_search_locations or ()) if nvidia else ()
    of_wheel = [str(file) for folder in folders for file in sorted(Path(folder).glob("cu*/bin/compute-sanitizer"))]
    return next(filter(None, map(shutil.which, ["compute-sanitizer", *of_wheel])), None)


def _kernels(machine: Machine, work: Path) -> Iterator[Stage]:
    size = () if machine.device == "cuda" else ("--quick",)
    name = f"kernels-{machine.device}" + ("" if machine.device == "cuda" else "-quick")
    for suite, (expected_s, limit_s) in SUITES.items():
        out = work / f"kernels-{suite}"
        options = ("--suite", suite, "--device", machine.device, *size, "--out", str(out))
        command = _python("-m", "benchmarks.kernels", *options, "--deadline", f"{limit_s - 60}")
        figures = out / f"{name}.json"
        yield Stage(f"kernels-{suite}", f"kernel suite {suite}", limit_s, command, figures, expected_s=expected_s)


def _ranks(machine: Machine) -> Stage:
    skip = "" if machine.device != "cuda" or machine.gpus > 1 else "needs two GPUs"
    # Products of float32 on tensor cores and other orders of summation: docs/policy.md has 1e-5 on CPUs.
    tolerance = "1e-5" if machine.device == "cpu" else "1e-3"
    command = _ctpo("verify", "--layouts", "tp2", "dp2", "--tolerance", tolerance)
    backend = "NCCL" if machine.device == "cuda" else "gloo"
    purpose = f"TP 2 and DP 2 over {backend} against float64"
    return Stage("two-ranks", purpose, 420, command, skip=skip, expected_s=90)
