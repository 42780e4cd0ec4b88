"""examples/agent_endpoint: an agent that checks itself, and what the dry run says of agents."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron.checks import check_extensions
from ctpo_megatron.config import Config, ConfigError, Job, load_config
from ctpo_megatron.config.rollout_rules import check_endpoint
from ctpo_megatron.config.rules import SAMPLING, TRAINING
from tests.environments.test_endpoint import Engine, played, sampled, sequences
from tests.extend.scripted import ROOT

SOURCE = ROOT / "examples" / "agent_endpoint" / "solve_and_check.py"
AGENT = {"name": "solve_and_check:solve_and_check", "arguments": {"rounds": 3}}


def configured(folder: Path, **endpoint: Any) -> Config:
    """A configuration over the quickstart's, next to the agent. endpoint: settings instead of its own."""
    shutil.copy(SOURCE, folder)
    tree = {
        "defaults": str(ROOT / "configs" / "quickstart.yaml"),
        "run": {"name": "tried", "root": str(folder)},
        "rollout": {"environment": "endpoint", "endpoint": {"agent": AGENT, "timeout_s": 300} | endpoint},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return load_config(folder / "run.yaml")


def test_the_example_checks_answers_in_a_conversation_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured(tmp_path)
    check_extensions(config)
    assert config.rollout.endpoint.agent is not None
    from solve_and_check import solve_and_check  # type: ignore[import-not-found] # copied above

    arguments = config.rollout.endpoint.agent.arguments
    trajectory = played(Engine("two", "No.", "one", "Yes."), partial(solve_and_check, **arguments))
    assert (trajectory.final_text, trajectory.finish_reason) == ("one", "answer")
    assert sampled(trajectory) == [f"{said}<|im_end|>" for said in ("two", "No.", "one", "Yes.")]
    assert len(sequences(trajectory)) == 3  # the answers, and a check of each


def test_the_dry_run_names_an_argument_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"rollout\.endpoint\.agent.*argument: 'rounds'; its signature is"):
        check_extensions(configured(tmp_path, agent="solve_and_check:solve_and_check"))


@pytest.mark.parametrize(
    ("override", "key", "severity", "message"),
    [
        ("rollout.environment=tools", "rollout.endpoint.agent", "warning", "never acts: rollout.environment is tools"),
        ("rollout.endpoint.agent=null", "rollout.endpoint.agent", "error", "needs the function that runs episodes"),
        ("rollout.endpoint.timeout_s=1800", "rollout.endpoint.timeout_s", "error", "is not below rollout.group_time"),
    ],
)
def test_settings_that_do_not_fit_each_other(
    tmp_path: Path, override: str, key: str, severity: str, message: str
) -> None:
    configured(tmp_path)
    config = load_config(tmp_path / "run.yaml", [override])
    assert check_endpoint in TRAINING and check_endpoint in SAMPLING
    (found,) = check_endpoint(config, None, Job(1))
    assert (found.key, found.severity) == (key, severity) and message in found.message
    assert [*check_endpoint(load_config(tmp_path / "run.yaml"), None, Job(1))] == []
