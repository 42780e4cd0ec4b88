"""Arguments in `rollout.engine.extra` are checked against the installed vLLM, which is not imported."""

from __future__ import annotations

from typing import Any

import pytest

from ctpo_megatron.config import Job
from ctpo_megatron.preflight import RunContext
from ctpo_megatron.preflight.engine import check_engine
from tests.support.minimal import minimal


def found(extra: dict[str, Any]) -> list[str]:
    config = minimal(rollout={"engine": {"extra": extra}})
    problems = check_engine(RunContext(config, None, Job(1), True))
    return [f"{p.severity}: {p}" for p in problems if p.key.startswith("rollout.engine.extra")]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"max_num_batched_tokens": 512, "enable_prefix_caching": False}, None),
        ({"bogus_arg": 1}, "error: rollout.engine.extra.bogus_arg = 1: vLLM has no such engine argument"),
        ({"enable_prefix_cashing": True}, "did you mean enable_prefix_caching?"),
        ({"max-num-batched-tokens": 1}, "did you mean max_num_batched_tokens?"),
        ({"enable_lora": True}, "warning: rollout.engine.extra.enable_lora = true: was never tried in a run"),
        ({"speculative_config": {"model": "x"}}, "was never tried in a run; compare mismatch/* of the first step"),
        ({"dtype": "half"}, "error: rollout.engine.extra.dtype"),
        ({"_api_process_rank": 1}, "vLLM has no such engine argument"),
    ],
)
def test_arguments_are_known_and_tried(extra: dict[str, Any], expected: str | None) -> None:
    said = found(extra)
    assert said == [] if expected is None else len(said) == 1 and expected in said[0], said
