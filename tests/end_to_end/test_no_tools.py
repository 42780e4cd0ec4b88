"""Plain RL without tools, with the configuration of docs/tutorials/own_model.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.small_run import TASK, Ctpo, records, train_main
from tests.support import ranks
from tests.support.prefork import ROOT

pytestmark = pytest.mark.timeout(900)
STEPS = 10


@pytest.mark.slow
def test_steps_without_tools(tmp_path: Path) -> None:
    ctpo = Ctpo(tmp_path)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {n} + {n + 1}?"}],
            "reward_model": {"ground_truth": f"{2 * n + 1}"},
        }
        for n in range(12)
    ]
    data = ctpo.directory / "plain.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        str(ROOT / "configs" / "no_tools.yaml"),
        f"model.path={TASK / 'model'}",
        f"data.train=[{data}]",
        "data.system_prompt=''",
        f"run.steps={STEPS}",
    ]
    command += ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "policy.mini_batch_prompts=2"]
    command += ["data.max_prompt_tokens=96", "rollout.max_response_tokens=64", "rollout.engine.max_model_len=160"]
    command += ["reward.function=endless_user:even_length_of_last_turn", f"extensions.path=[{Path(__file__).parent}]"]
    command += ["policy.threads=1", "tracking.live=plain"]
    how: Any = {"directory": ctpo.directory, "environment": ctpo.environment}
    planned = ranks.prefork().run(train_main, [*command, "--dry-run", "-v"], **how, deadline_s=60)
    assert planned.returncode == 0, planned.stderr[-4000:]
    assert "KV cache of each" in planned.stdout and "16 sequences x 160 tokens" in planned.stdout
    done = ranks.prefork().run(train_main, command, **how, deadline_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for said in (planned.stderr, done.stdout + done.stderr):
        about = [line for line in said.splitlines() if "warning" in line and "tool" in line.replace("no_tools", "")]
        assert about == []
    assert re.search(
        r"a KV cache of \d+ MiB each \(rollout\.engine\.kv_cache_mb; 16 sequences", done.stdout + done.stderr
    )
    run = ctpo.directory / "runs" / "no_tools"
    metrics = records(run)[1:]
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    assert any(record["actor/grad_norm"] > 0 for record in metrics)
    assert all(record["rollout/turns_mean"] == 1 and record["sandbox/calls"] == 0 for record in metrics)
    assert max(record["mismatch/log_prob_abs_max"] for record in metrics) < 1e-3
    assert not (run / "logs" / "sandbox.log").exists()
