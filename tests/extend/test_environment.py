"""examples/environment: an episode with a user in place of tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.base.extensions import ExtensionError, activate, load
from ctpo_megatron.checks import check_environment
from ctpo_megatron.config import (
    Config,
    Extension,
)
from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.environments import tool_schemas
from tests.extend.scripted import played, project


@pytest.fixture
def config() -> Config:
    return project("environment")


def test_a_user_answers_until_the_number_is_found(config: Config) -> None:
    check_environment(config.rollout.environment)
    assert tool_schemas(config.rollout) == []
    assert not config.rollout.needs_sandbox
    text, trajectory = played(config, "50", " many", "42", answer="42")
    assert text == ("50|[user: Too high. Please try again.] many|[user: Say a number. Please try again.]42|")
    assert (trajectory.finish_reason, trajectory.final_text) == ("answer", "42")
    assert sum(trajectory.response_mask) == len("50 many42") + 3
    assert trajectory.turn[-1] == 3
    assert reward(trajectory, "42") == 1.0 and reward(trajectory, "41") == 0.0


def reward(trajectory: Trajectory, answer: str) -> float:
    """What examples/environment pays for an episode."""
    paid = load("guess_the_number:found")(trajectory, Prompt("p", "source", (), answer, ()))
    return float(paid)


def test_guesses_run_out(config: Config) -> None:
    guesses = [str(guess) for guess in range(config.rollout.max_turns)]
    _, trajectory = played(config, *guesses, answer="42")
    assert (trajectory.finish_reason, trajectory.final_text) == ("max_turns", "")
    assert trajectory.turn[-1] == config.rollout.max_turns


def test_environments_that_are_refused(config: Config, tmp_path: Path) -> None:
    activate([tmp_path])
    (tmp_path / "slow_environment.py").write_text("class Plain:\n    def run(self, episode):\n        pass\n")
    for name, arguments, reason in (
        ("guess_the_number:GuessTheNumber", {"rude": True}, "unexpected keyword argument 'rude'"),
        ("guess_the_number:Message", {"role": "", "content": ""}, "has no method run"),
        ("slow_environment:Plain", {}, "run must be an `async def`"),
        ("chess", {}, "write tools or endpoint, or package.module:Name"),
    ):
        with pytest.raises(ExtensionError, match=reason):
            check_environment(Extension(name=name, arguments=arguments))
