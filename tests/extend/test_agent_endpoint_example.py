"""examples/agent_endpoint: an agent with OpenAI's client plays the quickstart's episodes, trains, and learns."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest

from tests.end_to_end import random_judge
from tests.end_to_end.small_run import SMALL, records
from tests.extend.scripted import trained
from tests.support.prefork import ROOT

FILES = (ROOT / "configs" / "quickstart.yaml", ROOT / "examples" / "agent_endpoint" / "agent_endpoint.yaml")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_steps_train_on_what_the_agent_did(tmp_path: Path) -> None:
    """After so little SFT nothing is right, so the length of a response is what it earns for."""
    shutil.copy(random_judge.__file__, tmp_path)
    judge = "reward.function={name: 'random_judge:judge', arguments: {fails: 0}}"
    folders = f"extensions.path=[examples/agent_endpoint, '{tmp_path}']"
    run, _ = trained(tmp_path, FILES, *SMALL, "run.steps=2", judge, folders, deadline_s=280)
    metrics = records(run)
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert max(record["mismatch/log_prob_abs_max"] for record in metrics[1:]) <= 1e-3
    assert all(record["tokens/trained"] > 0 and record["actor/grad_norm"] > 0 for record in metrics[1:])
    assert all(record["rollout/group_retries"] == 0 for record in metrics[1:])
    assert "val/toolmath/acc/mean@1" in metrics[-1]
    sampled = [records(run, f"trajectories/step_{step:06d}.parquet") for step in (1, 2)]
    for step, trajectories in enumerate(sampled, start=1):
        assert len(trajectories) == 16 and all(set(each["weight_version"]) == {-1, step} for each in trajectories)
        assert {each["finish_reason"] for each in trajectories} <= {"answer", "length", "max_turns"}
    assert (run / "extensions" / "openai_agent.py").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_learns(tmp_path: Path) -> None:
    metrics = records(trained(tmp_path, FILES, deadline_s=1400)[0])
    rewards = [record["reward/mean"] for record in metrics[1:]]
    assert statistics.fmean(rewards[-5:]) >= rewards[0] + 0.30
    accuracy = [record["val/toolmath/acc/mean@1"] for record in (metrics[0], metrics[-1])]
    assert accuracy[1] > accuracy[0]
