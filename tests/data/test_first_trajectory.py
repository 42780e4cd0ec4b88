"""The first trajectory, played by the dry run: real sandbox, template and scorer, and a model from a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import load_config
from ctpo_megatron.environments.prompts import chat_tokenizer, training_prompts
from ctpo_megatron.preflight.first_trajectory import FirstTrajectory, play_first
from tests.data.test_data_check import own, row, write  # noqa: F401 - a fixture


def first(*overrides: str) -> FirstTrajectory:
    config = load_config("own.yaml", list(overrides))
    activate(config.extensions.path or ())
    tokenizer = chat_tokenizer(config.model, [])
    prompt = training_prompts(config, tokenizer, 1).prompts[0]
    return play_first(config, tokenizer, prompt)


@pytest.fixture(autouse=True)
def folder(own: Path) -> Path:  # noqa: F811
    return own


@pytest.mark.parametrize(
    "overrides", [["rollout.tool_parser=hermes", "sandbox.url=null"], ["rollout.tool_parser=fenced"]]
)
def test_call_output_answer_and_reward(overrides: list[str]) -> None:
    """In a sandbox that the dry run starts, and in one that it finds."""
    found = first(*overrides)
    assert found.problems == []
    assert [title for title, _ in found.parts] == ["model", "output", "model", "reward"]
    call, output, answer, reward = (text for _, text in found.parts)
    assert "print(6 * 7)" in call and "42" in output and "\\boxed{2}" in answer
    assert reward == "1.0 for the ground truth in a box, 0.0 for no answer"


@pytest.mark.parametrize("overrides", [["rollout.tools=[]", "sandbox.url=null"], ["rollout.max_turns=1"]])
def test_nothing_is_called_where_nothing_can_be(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> None:
        raise AssertionError("no sandbox is needed")

    if "rollout.tools=[]" in overrides:
        monkeypatch.setattr("ctpo_sandbox.start_server", none)
    found = first(*overrides)
    assert found.problems == []
    assert [title for title, _ in found.parts] == ["model", "reward"]


def test_a_prompt_that_opens_the_thinking_is_answered_after_it(folder: Path) -> None:
    template = folder / "model" / "chat_template.jinja"
    template.write_text(template.read_text().rstrip() + "{% if add_generation_prompt %}<think>\n{% endif %}")
    found = first()
    assert found.problems == [] and found.parts[-1][1].startswith("1.0 for")
    assert found.parts[0][1].startswith("</think>")


def test_no_sandbox_is_a_doubt_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctpo_megatron.preflight.first_trajectory.FIRST_CALL_TIMEOUT_S", 1.0)
    (problem,) = first("sandbox.url=http://127.0.0.1:9", "sandbox.request_timeout_s=300").problems
    assert problem.severity == "warning" and "the first call was not tried" in str(problem)
    from ctpo_sandbox import SandboxStartError

    def refused(**_: object) -> None:
        raise SandboxStartError("no isolation that satisfies --require landlock")

    monkeypatch.setattr("ctpo_sandbox.start_server", refused)
    (problem,) = first("sandbox.url=null").problems
    assert problem.severity == "warning" and "no sandbox starts here: no isolation" in str(problem)


PARTS = """
from ctpo_megatron.environments.parsers.hermes import HermesParser

class BadExample(HermesParser):
    example = HermesParser.example.replace("6 * 7", "6 / 0")

class Episodes:
    async def run(self, episode):
        raise RuntimeError("must not be played")

def nothing(trajectory, prompt):
    return 0.0
"""


@pytest.fixture
def parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "first_parts.py").write_text(PARTS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "first_parts", raising=False)
    return "extensions.path=[.]"


def test_an_example_that_fails_is_named(parts: str) -> None:
    overrides = [parts, "rollout.tool_parser=first_parts:BadExample", "rollout.max_response_tokens=300"]
    (problem,) = first(*overrides).problems
    assert problem.failed and "ends with runtime_error" in str(problem) and "ZeroDivisionError" in str(problem)


def test_an_environment_of_ones_own_is_not_played(parts: str) -> None:
    found = first(parts, "rollout.environment=first_parts:Episodes")
    assert found.problems == [] and [title for title, _ in found.parts] == ["not played"]


def test_a_reward_that_the_right_answer_does_not_get(parts: str) -> None:
    (problem,) = first(parts, "reward.function=first_parts:nothing").problems
    assert problem.severity == "warning" and "earns 0.0 by first_parts:nothing, no answer 0.0" in str(problem)


def test_budgets_that_the_example_does_not_fit(folder: Path) -> None:
    (problem,) = first("rollout.max_response_tokens=20").problems
    assert problem.severity == "warning" and "already end with 'length'" in str(problem)


def test_a_template_without_tool_messages_is_an_error(folder: Path) -> None:
    template = folder / "model" / "chat_template.jinja"
    refuses = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template.write_text(refuses + template.read_text())
    (problem,) = first().problems
    assert problem.failed and "the first trajectory cannot be played" in str(problem)


def test_the_ground_truth_of_a_row_is_what_is_scored(folder: Path) -> None:
    write(folder / "train.jsonl", row("x?", r"\frac{1}{2}"))
    found = first()
    assert found.problems == [] and r"\boxed{\frac{1}{2}}" in found.parts[2][1]
