"""The first trajectory, played by the dry run: real sandbox, template and scorer, and a model from a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.checks.first_trajectory import FirstTrajectory, play_first
from ctpo_megatron.config import load_config
from ctpo_megatron.config.problems import Problem
from ctpo_megatron.environments import chat_tokenizer, training_prompts
from tests.data.rows import row, write
from tests.data.test_data_check import own  # noqa: F401 - a fixture


def first(*overrides: str) -> FirstTrajectory:
    config = load_config("own.yaml", list(overrides))
    activate(config.extensions.path or ())
    tokenizer = chat_tokenizer(config.model, [])
    prompt = training_prompts(config, tokenizer, limit=1).prompts[0]
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


def test_a_sandbox_that_does_not_start_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    from ctpo_sandbox import SandboxStartError

    def refused(**_: object) -> None:
        raise SandboxStartError("no isolation that satisfies --require landlock")

    monkeypatch.setattr("ctpo_sandbox.start_server", refused)
    (problem,) = first("sandbox.url=null").problems
    assert problem.severity == "warning" and "no sandbox starts here: no isolation" in str(problem)


SCORED_ALONE = ("rollout.tools=[]", "sandbox.url=null")
PARTS = """
import os, socket, time, urllib.request
import aiohttp, httpx

class Episodes:
    async def run(self, episode):
        raise RuntimeError("must not be played")

class WithoutExample:
    def mentions_call(self, text):
        return "<call>" in text
    def parse(self, text):
        return []
    def render(self, calls):
        return []

def nothing(trajectory, prompt):
    return 0.0

def broken(trajectory, prompt):
    return float(prompt.solution)

def for_boxes(trajectory, prompt):
    return float(trajectory.final_text.split("boxed{")[1][0] == prompt.answer)

def list_of_one(completions, prompt):
    return [1.0]

def ends(trajectory, prompt):
    os._exit(3)

def opens(trajectory, prompt):
    return len(open("/nowhere/rubric.txt").read())

def hangs(trajectory, prompt):
    time.sleep(3600)

def undecided(trajectory, prompt):
    return None

def by_socket(trajectory, prompt, *, url):
    socket.create_connection(("127.0.0.1", 9), timeout=5)

def by_urllib(trajectory, prompt, *, url):
    urllib.request.urlopen(url, timeout=5)

def by_httpx(trajectory, prompt, *, url):
    httpx.get(f"{url}/judge", timeout=5)

def by_client(trajectory, prompt, *, url):
    try:
        httpx.get(f"{url}/judge", timeout=5)
    except httpx.HTTPError as error:
        raise RuntimeError("the judge's client gives up") from error

async def by_aiohttp(trajectory, prompt, *, url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/judge"):
        pass

def in_vain(trajectory, prompt, *, url):
    raise TimeoutError("no answer within 1 s")

def bug_without_answer(trajectory, prompt, *, url):
    if "boxed" not in trajectory.final_text:
        raise KeyError("boxed")
    raise ConnectionError("the judge is away")
"""


@pytest.fixture
def parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "first_parts.py").write_text(PARTS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "first_parts", raising=False)
    return "extensions.path=[.]"


def test_an_environment_of_ones_own_is_not_played(parts: str) -> None:
    found = first(parts, "rollout.environment=first_parts:Episodes")
    assert found.problems == [] and [title for title, _ in found.parts] == ["not played"]


def test_a_parser_without_an_example_gets_no_call(parts: str) -> None:
    found = first(parts, "rollout.tool_parser=first_parts:WithoutExample", "data.tool_in_prompt=false")
    assert found.problems == [] and [title for title, _ in found.parts] == ["model", "reward"]


def scored_by(parts: str, name: str, *overrides: str) -> Problem:
    """The one problem of a first trajectory that this function scores, which is given the address of a judge."""
    arguments = ", arguments: {url: 'http://127.0.0.1:9/v1'}" if name in JUDGES else ""
    function = f"reward.function={{name: 'first_parts:{name}'{arguments}}}"
    (problem,) = first(parts, *SCORED_ALONE, function, *overrides).problems
    return problem


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "AttributeError: 'Prompt' object has no attribute 'solution' at "),
        ("for_boxes", "IndexError: list index out of range at "),  # of the answer without a box alone
        ("opens", "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/rubric.txt' at "),
        ("ends", "the scorer failed (ProcessExpired("),
        ("bug_without_answer", "KeyError: 'boxed'"),  # next to a judge that is away
    ],
)
def test_a_reward_function_that_fails_is_an_error(parts: str, name: str, said: str) -> None:
    problem = scored_by(parts, name)
    assert problem.failed and problem.key == "reward.function"
    assert f"first_parts:{name} gives no verdict on the first trajectory: the scorer failed (" in str(problem)
    assert said in str(problem) and "correct the function" in str(problem)


def test_the_function_of_the_data_source_is_the_one_that_is_named(parts: str) -> None:
    (problem,) = first(parts, *SCORED_ALONE, "reward.by_source={u: 'first_parts:broken'}").problems
    assert problem.failed and problem.key == "reward.by_source.u" and "first_parts:broken gives no" in str(problem)


def test_a_reward_function_that_returns_a_list_is_an_error_that_names_the_adapter(parts: str) -> None:
    problem = scored_by(parts, "list_of_one")
    assert problem.failed and "TypeError: " in str(problem) and problem.fix.startswith("TRL calls such functions: ")
    assert "docs/coming_from.md has an adapter" in str(problem)


JUDGES = {
    "by_socket": "ConnectionRefusedError: [Errno 111] Connection refused",
    "by_urllib": "URLError: ",
    "by_httpx": "ConnectError: ",
    "by_client": "RuntimeError: the judge's client gives up",
    "by_aiohttp": "ClientConnectorError: ",
    "in_vain": "TimeoutError: no answer within 1 s",
    "bug_without_answer": "",
}


@pytest.mark.parametrize("name", [name for name, said in JUDGES.items() if said])
def test_a_judge_that_is_not_there_is_a_warning_with_its_address(parts: str, name: str) -> None:
    problem = scored_by(parts, name)
    assert problem.severity == "warning" and JUDGES[name] in str(problem) and "start what it asks" in str(problem)
    asked = "http://127.0.0.1:9/v1/judge" if name in ("by_httpx", "by_client") else "http://127.0.0.1:9/v1"
    assert asked in str(problem) or (name == "by_aiohttp" and "127.0.0.1:9" in str(problem))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hangs", "killed after 0.5 s"),
        ("undecided", "earns None by first_parts:undecided"),
        ("nothing", "earns 0.0 by first_parts:nothing, no answer 0.0"),
    ],
)
def test_a_function_that_gives_the_right_answer_nothing_is_a_warning(parts: str, name: str, said: str) -> None:
    problem = scored_by(parts, name, "reward.timeout_s=0.5") if name == "hangs" else scored_by(parts, name)
    assert problem.severity == "warning" and said in str(problem)
    assert name != "nothing" or "ignore this where it reads another form" in str(problem)
    assert name != "hangs" or "reward.timeout_s" in problem.fix


def test_the_ground_truth_of_a_row_is_what_is_scored(folder: Path) -> None:
    write(folder / "train.jsonl", row("x?", r"\frac{1}{2}"))
    found = first()
    assert found.problems == [] and r"\boxed{\frac{1}{2}}" in found.parts[2][1]
