"""Which engine is made for which device, and that a GPU imports nothing of what serves CPUs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron import engines
from ctpo_megatron.engines.cpu import CpuSetup
from ctpo_megatron.engines.setup import EngineSetup, engine_setup
from tests.engines.pool_helpers import make_config
from tests.support.deadlines import scaled

ENGINES = Path(engines.__file__).parent

START = """
import asyncio, os, sys
from pathlib import Path
from types import SimpleNamespace
from ctpo_megatron.config import Config
from ctpo_megatron.engines import EnginePool, engine, tasks

class LLM:
    model_config = SimpleNamespace(dtype=None)
    made = []
    def from_engine_args(arguments):
        LLM.made.append(arguments)
        return LLM()
    async def update_weight_version(self, version): ...
    def get_tokenizer(self): ...

def module(name, **members):
    sys.modules[name] = SimpleNamespace(**members)

module("vllm.config", WeightTransferConfig=dict)
module("vllm.engine.arg_utils", AsyncEngineArgs=dict)
module("vllm.engine.async_llm_engine", AsyncLLMEngine=LLM)
module("ctpo_megatron.engines.weights.receiver", backend=str)
import ctpo_megatron.engines.weights
ctpo_megatron.engines.weights.receiver = sys.modules["ctpo_megatron.engines.weights.receiver"]
engine.redirect_output = lambda path: None
engine._node_address = lambda: "127.0.0.1"
engine.RolloutEngine._make_codec = lambda self, tokenizer: None
run = {"run": {"name": "a", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["t"]}}
config = Config.model_validate(run | {"rollout": {"tools": []}})
spec = tasks.EngineSpec(config, "http://127.0.0.1:1", Path("."), device="cuda", transport="nccl")
actor = engine.RolloutEngine(0, spec)
asyncio.run(actor.start())
(arguments,) = LLM.made
assert arguments["gpu_memory_utilization"] == config.rollout.engine.gpu_memory_utilization
assert arguments["dtype"] == "float32" and config.rollout.engine.dtype == "auto"
assert "enable_chunked_prefill" not in arguments and "TORCHDYNAMO_DISABLE" not in os.environ
print("CPU:", [name for name in sys.modules if name.startswith("ctpo_megatron.engines.cpu")])
"""


def test_an_engine_on_a_gpu_imports_nothing_of_what_serves_cpus() -> None:
    """From the import of the pool to a started engine, with stand-ins for vLLM: its own modules need a GPU."""
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "CPU: []"


def test_an_engine_that_is_no_actor_starts_without_ray() -> None:
    alone = START.replace("EnginePool, ", "").replace("(0, spec)", '(0, spec, "127.0.0.1")')
    code = "import sys\nsys.modules['ray'] = None\n" + alone.replace("engine._node_address = ", "node_address = ")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0, done.stderr


def test_what_serves_cpus_is_imported_only_within_functions() -> None:
    """Where a device is known: the switch, a layer that is on a CPU, a trainer that is."""
    imported: dict[str, int] = {}
    for path in sorted(ENGINES.rglob("*.py")):
        if not path.is_relative_to(ENGINES / "cpu"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            everywhere = _imports_of_cpu(ast.walk(tree))
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            within = {id(part) for function in functions for part in ast.walk(function)}
            assert all(id(node) in within for node in everywhere), path
            imported |= {str(path.relative_to(ENGINES)): len(everywhere)} if everywhere else {}
    assert imported == {"__init__.py": 1, "setup.py": 1, "weights/receiver.py": 1}


def _imports_of_cpu(nodes: object) -> list[ast.AST]:
    return [
        node
        for node in nodes  # type: ignore[attr-defined]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ctpo_megatron.engines.cpu")
    ]


def test_the_switch() -> None:
    assert type(engine_setup("cpu")) is CpuSetup and type(engine_setup("cuda")) is EngineSetup


@pytest.mark.parametrize(("rollout", "on_cpu"), [({}, (64, 1)), ({"max_staleness": 1}, (32, 1)), ({"lag": 1}, (32, 1))])
def test_an_engine_that_samples_ahead_samples_the_earliest_step_first(
    tmp_path: Path, rollout: dict[str, Any], on_cpu: tuple[int, int]
) -> None:
    """On a CPU, fewer sequences at once: a step of the engine takes longer the more are in it."""
    for most, fewer in zip((64, 1), on_cpu, strict=True):
        engine = {"max_num_seqs": most, "max_model_len": 320, "kv_cache_mb": 32}
        config = make_config(tmp_path, tmp_path, engine=engine, **rollout)
        for device, count in (("cuda", most), ("cpu", fewer)):
            arguments = engine_setup(device).arguments(config, "m")  # type: ignore[arg-type]
            assert (arguments["max_num_seqs"], arguments["scheduling_policy"]) == (count, "priority")
