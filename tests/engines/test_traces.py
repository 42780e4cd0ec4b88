"""Traces of engines: a file for each step that is traced, and a line in the log where there can be none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.run_paths import RunPaths
from tests.engines.pool_helpers import Stage

pytestmark = pytest.mark.timeout(600)


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]  # type: ignore[no-any-return]


def test_an_engine_writes_a_trace_of_each_step(users_stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunPaths(users_stage.config.run.directory).profile
    for step in (3, 4):
        users_stage.fleet.begin_trace(step)
        users_stage.generate(users_stage.prompts(2), step=step)
        users_stage.fleet.end_trace()
        users_stage.generate(users_stage.prompts(2), step=9)  # outside of a trace
    files = sorted(folder.glob("*.json.gz"))  # on a CPU vLLM writes a table of the operators as well
    assert [path.name[:20] for path in files] == ["step_000003_engine_0", "step_000004_engine_0"] and not caplog.records
    for path in files:
        names = [event.get("name", "") for event in events_of(path)]
        steps = [name for name in names if name.startswith("execute_")]
        assert 1 < len(steps) <= 257 and "aten::embedding" in names
        assert path.stat().st_size < 8 << 20


def test_an_engine_that_cannot_be_traced_is_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.fleet.begin_trace(1)
    stage.fleet.end_trace()
    [record] = caplog.records
    assert "rollout engine 0 did not begin its trace: " in record.getMessage()
    assert "Profiling is not enabled" in record.getMessage() and "log: " in record.getMessage()
    assert stage.generate(stage.prompts(1))
