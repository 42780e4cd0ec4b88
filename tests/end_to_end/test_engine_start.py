"""Engines load while the supervised stage goes on: what keeps them from starting is said then, not after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.small_run import Ctpo, records

STEPS = 4000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_that_do_not_start_end_the_supervised_stage(tmp_path: Path) -> None:
    done = Ctpo(tmp_path).launch(
        f"sft.steps={STEPS}", "rollout.engine.extra={load_format: no_such_format}", "run.name=broken"
    )
    assert done.returncode == 1
    assert "rollout engine 0 did not start: " in done.stderr and "no_such_format" in done.stderr
    assert 0 < len(records(tmp_path / "runs" / "broken", "sft.jsonl")) < STEPS
