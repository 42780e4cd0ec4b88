"""The CUDA builds of the lock without a GPU: everything imports, names fit, engines and layers are made."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import children

pytestmark = pytest.mark.cuda_environment

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_paths()["purelib"])
CUDA = SITE / "nvidia" / "cu13"
MODULES = (
    "torch",
    "triton",
    "transformer_engine.pytorch",
    "vllm",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.device_allocator.cumem",
    "vllm.vllm_flash_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.distributed.weight_transfer.nccl_engine",
    "vllm.distributed.weight_transfer.ipc_engine",
    "vllm.distributed.device_communicators.pynccl",
    "vllm.v1.attention.backends.flash_attn",
    "megatron.core.optimizer",
    "megatron.core.extensions.transformer_engine",
    "ctpo_kernels",
    "ctpo_megatron.policy",
    "ctpo_megatron.train",
    "ctpo_megatron.engines.weights.receiver",
)
LIBRARIES = {"vllm", "megatron", "torch", "ray", "triton", "transformer_engine"}
SOURCES = [
    path
    for pattern in ("ctpo_megatron/**/*.py", "kernels/ctpo_kernels/**/*.py", "launchers/**/*.py")
    for path in sorted(ROOT.glob(pattern))
]


def probe(name: str, *arguments: str) -> Any:
    done = children.run(
        [sys.executable, "-m", "tests.cuda_environment.probes", name, *arguments], deadline_s=280, directory=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", MODULES)
def test_everything_of_a_gpu_machine_can_be_imported(module: str) -> None:
    assert probe("imported", module) == module


def test_no_package_lacks_another() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_compiler_of_the_lock_takes_the_headers_of_the_lock(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("#include <cub/cub.cuh>\n__global__ void zero(float *x) { x[0] = 0; }\n")
    if not (compiler := CUDA / "bin" / "nvcc").exists():
        pytest.skip("the lock brings no nvcc")
    headers = [f"-I{CUDA}/include", f"-I{CUDA}/include/cccl"]
    command = [str(compiler), "-arch=sm_90a", *headers, "-c", str(source), "-o", str(tmp_path / "kernel.o")]
    done = children.run(command, deadline_s=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_triton_can_compile_its_launchers() -> None:
    assert os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    assert (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


def imports_of(tree: ast.Module) -> Iterator[tuple[ast.ImportFrom, ast.alias]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            yield from ((node, alias) for alias in node.names)


def found(module: str, name: str) -> Any:
    owner = importlib.import_module(module)
    return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_and_keywords_that_a_file_takes_from_libraries(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known, wrong = dict[str, Any](), list[str]()
    for node, alias in imports_of(tree):
        try:
            known[alias.asname or alias.name] = found(str(node.module), alias.name)
        except (ImportError, AttributeError) as error:
            wrong.append(f"line {node.lineno}: {node.module}.{alias.name}: {error}")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        wrong += [f"line {call.lineno}: no {word}" for word in unknown_keywords(call, known.get(call.func.id))]  # type: ignore[attr-defined]
    assert wrong == []


def unknown_keywords(call: ast.Call, function: Any) -> set[str]:
    if not callable(function):
        return set()
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled code without a signature
        return set()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return {keyword.arg for keyword in call.keywords if keyword.arg} - set(parameters)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.policy import models

    folder = tmp_path_factory.mktemp("model")
    models.build("qwen3-tied", folder, layers=2)
    return folder


@pytest.mark.parametrize("eager", ["true", "false"])
@pytest.mark.parametrize(("mode", "transport"), [("colocated", "ipc"), ("disaggregated", "nccl")])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_vllm_takes_the_arguments_of_our_engines_on_eight_h100(
    mode: str, transport: str, runner: str, eager: str, model: Path
) -> None:
    overrides = [
        "rollout.engine.dtype=bfloat16",
        f"rollout.engine.model_runner={runner}",
        f"rollout.engine.enforce_eager={eager}",
    ]
    seen = probe("engine", str(ROOT / "configs" / "quickstart.yaml"), str(model), mode, *overrides)
    assert seen["cuda"]
    assert seen["transport"] == transport
    assert seen["v2 runner"] == (runner == "v2")
    assert (seen["graphs"] == "NONE") == (eager == "true")
    assert seen["sleep"] == (mode == "colocated")
    assert seen["log-probs"].endswith("processed_logprobs")


@pytest.mark.parametrize("optimizer", ["distributed", "each rank"])
def test_our_model_with_layers_of_transformer_engine(optimizer: str) -> None:
    seen = probe("transformer_engine", optimizer)
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= set(seen["layers"])
    assert seen["Adam"].startswith("transformer_engine.")
    assert seen["weights equal"] and seen["state equal"]
