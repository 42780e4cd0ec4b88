"""The agent of docs/agents.md, as a reader would save it, and what the dry run says of agents."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron.config import Config, ConfigError, load_config
from ctpo_megatron.preflight import check_extensions
from ctpo_megatron.preflight.check import RunContext
from ctpo_megatron.preflight.configuration import SAMPLING, TRAINING
from ctpo_megatron.preflight.engine import check_endpoint
from tests.environments.test_endpoint import Engine, played, sampled, sequences
from tests.extend.document_examples import DOCS, example
from tests.extend.scripted import ROOT

PAGE = DOCS / "agents.md"
MOST_LINES = 120


def configured(folder: Path, **endpoint: Any) -> Config:
    """The example's configuration over the quickstart's. endpoint: settings instead of the example's."""
    _, settings = example("agent", folder, PAGE)
    tree = yaml.safe_load(settings)
    tree["rollout"]["endpoint"] |= endpoint
    tree |= {"defaults": str(ROOT / "configs" / "quickstart.yaml"), "run": {"name": "tried", "root": str(folder)}}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return load_config(folder / "run.yaml")


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= MOST_LINES


def test_the_example_checks_answers_in_a_conversation_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured(tmp_path)
    check_extensions(config)
    assert config.rollout.endpoint.agent is not None
    from my_agent import solve_and_check  # type: ignore[import-not-found] # written above

    arguments = config.rollout.endpoint.agent.arguments
    trajectory = played(Engine("two", "No.", "one", "Yes."), partial(solve_and_check, **arguments))
    assert (trajectory.final_text, trajectory.finish_reason) == ("one", "answer")
    assert sampled(trajectory) == [f"{said}<|im_end|>" for said in ("two", "No.", "one", "Yes.")]
    assert len(sequences(trajectory)) == 3  # the answers, and a check of each


@pytest.mark.parametrize(
    ("endpoint", "key", "message"),
    [
        ({"agent": "no_agent:solve"}, "rollout.endpoint.agent", "there is no module 'no_agent'"),
        ({"agent": "my_agent:solve"}, "rollout.endpoint.agent", "has no 'solve'; define it there"),
        ({"agent": "my_agent:solve_and_check"}, "rollout.endpoint.agent", "argument: 'rounds'; its signature is"),
    ],
)
def test_the_dry_run_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: dict[str, Any], key: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        check_extensions(configured(tmp_path, **endpoint))
    assert [problem.key for problem in refused.value.problems] == [key]
    assert message in str(refused.value)


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
    (found,) = check_endpoint(RunContext(config))
    assert (found.key, found.severity) == (key, severity) and message in found.message
    assert [*check_endpoint(RunContext(load_config(tmp_path / "run.yaml")))] == []
