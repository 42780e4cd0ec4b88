"""Which engine is made for which device, what it is made with, and where it writes: outside of Ray, without a model."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron import engines
from ctpo_megatron.config import EngineConfig
from ctpo_megatron.engines import engine_setup
from ctpo_megatron.engines.cpu import CpuSetup
from tests.engines.pool_helpers import make_config
from tests.engines.tiny_model import tiny_tokenizer
from tests.support.deadlines import scaled

ENGINES = Path(engines.__file__).parent

MADE = """
import asyncio, os, sys
from pathlib import Path
from types import SimpleNamespace
from ctpo_megatron.config import Config
from ctpo_megatron.engines import EngineSpec, RolloutEngine

root = Path(sys.argv[1])
run = {"run": {"name": "a", "steps": 1}, "model": {"path": str(root)}, "data": {"train": ["t"]}}
config = Config.model_validate(run | {"rollout": {"tools": []}})
"""

START = """
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
spec = EngineSpec(config, "http://127.0.0.1:1", root, device="cuda", transport="nccl")
facts = asyncio.run(RolloutEngine(0, spec, "127.0.0.1").start())
assert (facts.address, facts.transport, facts.workers) == ("127.0.0.1", "nccl", 1)
(arguments,) = LLM.made
assert arguments["gpu_memory_utilization"] == config.rollout.engine.gpu_memory_utilization
assert arguments["dtype"] == "float32" and config.rollout.engine.dtype == "auto"
assert "enable_chunked_prefill" not in arguments and "TORCHDYNAMO_DISABLE" not in os.environ
print("CPU:", [name for name in sys.modules if name.startswith("ctpo_megatron.engines.cpu")])
"""


def log_of(program: str, root: Path, environment: dict[str, str] | None = None) -> list[str]:
    """What a program, whose argument is `root`, has written to the log of the engine that it makes."""
    command = [sys.executable, "-c", program, str(root)]
    surroundings = os.environ | (environment or {})
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=scaled(120))
    (path,) = root.glob("**/rollout_engine_0*.log")
    text = path.read_text(encoding="utf-8")
    assert done.returncode == 0, done.stderr + text
    assert done.stdout == ""
    return text.splitlines()


@pytest.mark.parametrize("before", ["import ctpo_megatron.engines.pool\n", "import sys\nsys.modules['ray'] = None\n"])
def test_an_engine_on_a_gpu_imports_nothing_of_what_serves_cpus(tmp_path: Path, before: str) -> None:
    """With stand-ins for vLLM, whose own modules need a GPU; in a run, and where there is no Ray."""
    tiny_tokenizer().save_pretrained(tmp_path)
    assert log_of(before + MADE + START, tmp_path)[-1] == "CPU: []"


def test_what_serves_cpus_is_imported_only_within_functions() -> None:
    """Where a device is known: the switch, a layer that is on a CPU, a trainer that is."""
    imported: dict[str, int] = {}
    for path in sorted(ENGINES.rglob("*.py")):
        if not path.is_relative_to(ENGINES / "cpu"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            everywhere = _imports_of_cpu(ast.walk(tree))
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            functions += [node for node in tree.body if isinstance(node, ast.If)]  # for type checkers, or when used
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
    assert type(engine_setup("cpu")) is CpuSetup and not isinstance(engine_setup("cuda"), CpuSetup)


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


SPEAK = """
RolloutEngine(0, EngineSpec(config, None, root), "127.0.0.1")
import logging
if engine_made:  # as an engine and its core process do
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    configure_logging(LoggingConfig())
log = logging.getLogger("vllm.spoken")
log.warning("%s: Failed to load weights", "RotaryEmbedding")
log.warning("%s: Failed to load weights", "QKVParallelLinear")
log.info("too quiet")
"""


@pytest.mark.parametrize("engine_made", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_expected_messages_are_left_out_of_an_engines_log(tmp_path: Path, engine_made: bool) -> None:
    """What vLLM says as if it had failed. Everything else of it stays in."""
    first, *others = log_of(f"engine_made = {engine_made}{MADE}{SPEAK}", tmp_path)
    assert first.startswith("# 10 kinds of messages are expected and left out")
    (line,) = [line for line in others if "vllm.spoken" in line]
    assert "WARNING vllm.spoken" in line and line.endswith("QKVParallelLinear: Failed to load weights")
    assert not any("RotaryEmbedding" in line for line in others)


def test_every_expected_message_is_in_vllms_source() -> None:
    """A message that vLLM no longer has would hide nothing, or something else."""
    settings = Path(engine_setup("cpu").environment(EngineConfig())["VLLM_LOGGING_CONFIG_PATH"])
    messages = json.loads(settings.read_text(encoding="utf-8"))["filters"]["expected"]["messages"]
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations  # importing it takes ten CPU-seconds
    named = ("config/vllm.py", "engine/arg_utils.py", "platforms/cpu.py", "triton_utils/importing.py", "v1/utils.py")
    named += ("model_executor/model_loader/reload/layerwise.py",)
    text = " ".join((Path(folder) / name).read_text(encoding="utf-8") for name in named)
    text = " ".join(text.replace('"', " ").replace("\n", " ").split())
    assert len(messages) == 10 and all(messages.values())
    for message in messages:
        start = message.partition(": ")[2] if message.endswith("weights") else message
        assert start in text, message


SEATED = """
engine = RolloutEngine(0, EngineSpec(config, None, root / "logs"), "127.0.0.1")
print("here")
"""


@pytest.mark.parametrize("seen", [True, False])
def test_a_log_is_where_the_run_directory_is_seen(tmp_path: Path, seen: bool) -> None:
    """Else in a folder of its own among the temporary files of its node."""
    (tmp_path / "tmp").mkdir()
    if seen:
        (tmp_path / "logs").mkdir()
    assert log_of(MADE + SEATED, tmp_path, {"TMPDIR": str(tmp_path / "tmp")})[-1] == "here"
    (path,) = tmp_path.glob("**/*.log")
    assert path.parent == tmp_path / "logs" if seen else path.parent.name.startswith("ctpo-logs-")
    assert path.parent.parent == (tmp_path if seen else tmp_path / "tmp")
