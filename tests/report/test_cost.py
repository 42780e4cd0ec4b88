"""What a step costs: by phase, and how long trainer and engines wait."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report import Comparison, RunData, write_comparison, write_report
from ctpo_megatron.report.summary import REST, StepCost


def write(run: Path, steps: list[dict[str, Any]]) -> RunData:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("rollout: {prompts_per_step: 4, samples_per_prompt: 8}\n")
    RunPaths(run).metrics.write_text("".join(json.dumps(record) + "\n" for record in steps))
    return RunData.load(run)


def step(number: int, **seconds: float) -> dict[str, Any]:
    timed = {f"time/{name}": value for name, value in seconds.items()}
    return {"step": number, **timed, **{f"{name}_cpu": 0.1 for name in timed}, "tokens/total": 1000.0}


STEPS = [
    {"step": 0, "time/eval": 50.0, "time/eval_cpu": 1.0},
    step(1, step=10.0, rollout=6.0, update=2.0, old_log_probs=1.0)
    | {"throughput/update_tokens_per_s": 400.0, "throughput/update_mfu": 0.2},
    step(2, step=20.0, rollout=14.0, update=4.0, old_log_probs=1.0, checkpoint=0.5)
    | {"throughput/update_tokens_per_s": 200.0, "throughput/update_mfu": 0.1, "time/update_overhead_fraction": 0.3},
]


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    cost = StepCost.of(write(tmp_path / "run", STEPS))
    assert cost is not None and cost.engines_idle is None
    assert (cost.step_s, cost.samples_per_s, cost.tokens_per_s) == (15.0, 32 / 15, 1000 / 15)
    found = {each.name: each.seconds for each in cost.phases}
    assert found == {"rollout": 10.0, "update": 3.0, "old_log_probs": 1.0, "checkpoint": 0.25, REST: 0.75}
    assert list(found) == ["rollout", "update", "old_log_probs", REST, "checkpoint"]
    assert sum(each.share for each in cost.phases) == pytest.approx(1.0)
    assert cost.trainer_waits == pytest.approx(1 - 4 / 15)
    assert (cost.phases[1].tokens_per_s, cost.mfu("update"), cost.mfu("rollout")) == (300.0, pytest.approx(0.15), None)


def test_a_run_without_a_step_has_no_cost(tmp_path: Path) -> None:
    assert StepCost.of(write(tmp_path / "run", STEPS[:1])) is None
    assert StepCost.of(write(tmp_path / "other", [])) is None


def test_report_and_comparison_show_it(tmp_path: Path) -> None:
    slow = [record | {"time/step": 2 * record["time/step"]} if "time/step" in record else record for record in STEPS]
    measured = [record | {"rollout/engines_idle": 0.25 * record["step"]} for record in STEPS]
    runs = [write(tmp_path / "a", measured), write(tmp_path / "b", slow)]
    (tmp_path / "b" / "config.yaml").write_text("rollout: {prompts_per_step: 8, samples_per_prompt: 8}\n")
    page = re.sub(r"\s+", " ", write_report(runs[0].directory).read_text(encoding="utf-8"))
    for shown in ("2.13 samples per second, 67 tokens per second", "73%", "38%", "15.0%", "<td>old_log_probs</td>"):
        assert shown in page
    compared = Comparison.load([run.directory for run in runs])
    table = compared.cost_table()
    assert table is not None
    cells = dict(zip(table.header, zip(*table.rows, strict=True), strict=True))
    assert cells["seconds a step"] == ("15", "30") and cells["trainer waits"] == ("73%", "87%")
    assert cells["engines wait"] == ("38%", "–") and cells["MFU of the update"] == ("15.0%", "15.0%")
    page = write_comparison(compared, tmp_path / "page.html").read_text()
    assert "trainer waits" in page and "87%" in page


def test_a_comparison_of_runs_without_steps_has_no_table(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, STEPS[:1]).directory for name in ("a", "b")]
    assert Comparison.load(runs).cost_table() is None
