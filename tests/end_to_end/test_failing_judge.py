"""Whole runs whose judge fails at random: for a fifth of the samples they train on; for most, both ranks end."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from ctpo_megatron.tracking import read_trajectories, trajectory_files
from tests.end_to_end import random_judge
from tests.end_to_end.small_run import Ctpo, records

SETTINGS = (
    *("sft=null", "eval.before_training=false", "eval.every=0", "data.eval=[]", "export.enabled=false"),
    *("tracking.report=false", "tracking.trajectories=all", "checkpoint.every=0", "run.steps=20"),
    *("rollout.max_response_tokens=64", "rollout.max_turn_tokens=32"),
)
SAMPLES, CAUSES = 16, ("failures", "crashes", "nones", "not_finite")


def judged(ctpo: Ctpo, fails: float) -> str:
    shutil.copy(random_judge.__file__, ctpo.directory)
    return f"reward.function={{name: 'random_judge:judge', arguments: {{fails: {fails}}}}}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_judge_that_fails_for_a_fifth_does_not_end_the_run(tmp_path: Path) -> None:
    ctpo = Ctpo(tmp_path)
    path = f'extensions.path=["{tmp_path}"]'
    done = ctpo.train(*SETTINGS, "run.name=fifth", path, judged(ctpo, 0.2))
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in records(tmp_path / "runs/fifth") if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, 21))
    shares = [line.get("reward/no_verdict", 0.0) for line in lines]
    assert 0.1 < sum(shares) / len(shares) < 0.3
    for line in lines:
        lost = round(SAMPLES * line.get("reward/no_verdict", 0.0))
        assert sum(line.get(f"reward/{name}", 0.0) for name in CAUSES) == lost
        assert line["reward/timeouts"] == 0 and math.isfinite(line["actor/grad_norm"])
    assert all(any(line.get(f"reward/{name}") for line in lines) for name in CAUSES)
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    for line, file in zip(lines, trajectory_files(tmp_path / "runs/fifth").values(), strict=True):
        found = read_trajectories(file)
        rewards = [record["reward"] for record in found if record["reward"] is not None]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        missing = [record for record in found if "no_verdict" in record]
        assert len(missing) == SAMPLES - len(rewards)
        assert all("log_ratio" not in record and not any(record["loss_mask"]) for record in missing)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_end_together(tmp_path: Path) -> None:
    ctpo = Ctpo(tmp_path)
    done = ctpo.launch(*SETTINGS, "run.name=two", f'extensions.path=["{tmp_path}"]', judged(ctpo, 0.8), ranks=2)
    assert done.returncode != 0
    assert "of the samples of steps 1 to 3 have no verdict" in done.stderr
    assert (tmp_path / "runs/two/checkpoints/step_000003/COMPLETE.json").exists()
    lines = [line for line in records(tmp_path / "runs/two") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
