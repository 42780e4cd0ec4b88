"""Agents of one's own: the endpoint as OpenAI's client and others see it, and what is recorded of their calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.checks import check_agent
from ctpo_megatron.config import Extension
from ctpo_megatron.data import Trajectory
from ctpo_megatron.environments import (
    AgentTask,
    EpisodeLimits,
    ModelTurn,
    ToolEnvironment,
    ToolUnavailable,
)
from tests.engines.tiny_model import CALL
from tests.environments.endpoint_stand import (
    QUESTION,
    TOOLS,
    Agent,
    Engine,
    InPairs,
    Stand,
    Tool,
    asked,
    client_of,
    ids_of,
    played,
    sampled,
    sequences,
    solve,
    text_of,
)
from tests.support.deadlines import scaled
from tests.support.recorded import through_a_file


@pytest.mark.parametrize("shown", [True, False])
def test_an_agent_that_does_what_the_built_in_environment_does_has_its_tokens(shown: bool) -> None:
    """Also where the run's prompts do not show its tools (`data.tool_in_prompt`)."""
    texts = ("so " + CALL, CALL, "It is 1.")
    ours = played(Engine(*texts), solve, shown=shown)

    async def built_in() -> Trajectory:
        return await Stand(Engine(*texts), solve, shown=shown).trajectory(ToolEnvironment())

    theirs = asyncio.run(built_in())
    assert ours.tokens.tobytes() == theirs.tokens.tobytes()
    assert (ours.finish_reason, ours.final_text, ours.sequence_starts) == ("answer", "It is 1.", [])
    assert [(c.turn, c.name, c.arguments, c.status, c.output) for c in ours.tool_calls] == [
        (c.turn, c.name, c.arguments, c.status, c.output) for c in theirs.tool_calls
    ]


def test_the_answers_ids_are_continued_though_they_would_be_rendered_otherwise() -> None:
    """The model's call is one token of its own JSON; the template writes another text."""
    engine = Engine(CALL, "1")
    played(engine, solve)
    assert ids_of(CALL)[0] in engine.read[1][0]
    assert "<tool_call>code_interpreter" not in text_of(engine.read[1][0])


def test_another_history_is_another_sequence_and_the_longest_match_is_extended() -> None:
    async def agent(task: AgentTask) -> str:
        first = [*task.messages]
        said = await asked(task, first)
        first += [said, {"role": "user", "content": "sure?"}]
        helper: list[Any] = [{"role": "user", "content": "help"}]
        helped = await asked(task, helper)
        again = await asked(task, first)
        helper += [helped, {"role": "user", "content": "more"}]
        await asked(task, helper)
        changed = [*task.messages, {"role": "assistant", "content": "Not what it said."}, first[-1]]
        await asked(task, changed)
        first += [again, {"role": "user", "content": "really?"}]
        return str((await asked(task, first)).content)

    trajectory = played(Engine("one", "aid", "two", "aids", "three", "four"), agent)
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert sequences(trajectory) == [
        # Without tools in the request the prompt of the data has another beginning.
        user.format("What is 1?") + "one<|im_end|>\n" + user.format("sure?") + "two<|im_end|>\n"
        + user.format("really?") + "four<|im_end|>",
        user.format("help") + "aid<|im_end|>\n" + user.format("more") + "aids<|im_end|>",
        "<|im_start|>user\nWhat is 1?<|im_end|>\n<|im_start|>assistant\nNot what it said.<|im_end|>\n"
        + user.format("sure?") + "three<|im_end|>",
    ]  # fmt: skip
    assert sampled(trajectory) == [f"{said}<|im_end|>" for said in ("one", "aid", "two", "aids", "three", "four")]
    assert trajectory.model_tokens == sum(trajectory.loss_mask) == sum(map(len, map(ids_of, sampled(trajectory))))
    assert trajectory.final_text == "four"
    assert through_a_file([trajectory]) == [trajectory]


def test_two_answers_to_one_history_are_in_one_loss_each() -> None:
    async def agent(task: AgentTask) -> None:
        await asyncio.gather(*(asked(task, task.messages, tools=task.tools) for _ in range(2)))
        history = [*task.messages, {"role": "assistant", "content": "one"}, {"role": "user", "content": "?"}]
        await asyncio.gather(*(asked(task, history, tools=task.tools) for _ in range(2)))

    trajectory = played(InPairs("one", "two", "three", "four"), agent)
    texts = sequences(trajectory)
    assert len(texts) == 3
    assert sorted(sampled(trajectory)) == sorted(f"{said}<|im_end|>" for said in ("one", "two", "three", "four"))
    assert texts[0].count("one") == 1 and texts[2].count("one") == 1
    masks = [trajectory.loss_mask[part] for part in trajectory.sequences]
    assert sum(map(sum, masks)) == sum(len(ids_of(said)) + 1 for said in ("one", "two", "three", "four"))


def test_of_two_sequences_that_match_the_longer_one_is_extended() -> None:
    async def agent(task: AgentTask) -> None:
        for _ in range(2):
            first = await asked(task, QUESTION)
        history = [*QUESTION, first, {"role": "user", "content": "?"}]
        second = await asked(task, history)
        await asked(task, [*history, second, {"role": "user", "content": "!"}])

    texts = sequences(played(Engine("one", "one", "two", "three"), agent))
    assert sorted(text.count("<|im_end|>") for text in texts) == [2, 6]


def test_the_agent_is_shown_the_prompt_and_no_ground_truth() -> None:
    seen: list[AgentTask] = []

    async def agent(task: AgentTask) -> str:
        seen.append(task)
        await asked(task, task.messages)
        return "mine"

    trajectory = played(Engine("one"), agent)
    (task,) = seen
    assert (task.messages, task.tools, task.model) == (QUESTION, TOOLS, "policy")
    assert task.row == {"id": "p", "data_source": "source", "level": 3}
    assert task.seed == 1234 and "'1'" not in repr(task) and task.api_key not in repr(task)
    assert trajectory.final_text == "mine"


def test_plain_functions_run_beside_each_other() -> None:
    ready: list[float] = []

    def agent(task: AgentTask) -> str:
        ready.append(time.monotonic())
        deadline = time.monotonic() + scaled(20)
        while len(ready) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(ready) == 20, "the others have not begun"
        with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            done = client.chat.completions.create(model=task.model, messages=task.messages, tools=task.tools)
        message = done.choices[0].message
        assert message.tool_calls
        return asyncio.run(task.call_tool(message.tool_calls[0]))

    async def run() -> list[Trajectory]:
        stand = Stand(Engine(*[CALL] * 20), agent)
        try:
            return await asyncio.gather(*(stand.trajectory() for _ in range(20)))
        finally:
            await stand.environment.aclose()

    assert {each.final_text for each in asyncio.run(run())} == {"1"}


@pytest.mark.parametrize(
    ("limits", "texts", "reason", "code"),
    [
        ({"max_turns": 2}, [CALL] * 3, "max_turns", "max_turns"),
        ({"max_response_tokens": 60}, [CALL] * 3, "length", "context_length_exceeded"),
        ({"max_tool_calls": 1}, [CALL] * 3, "tool_budget", None),
    ],
)
def test_budgets_end_the_conversation(limits: dict[str, int], texts: list[str], reason: str, code: str | None) -> None:
    errors: list[openai.BadRequestError] = []

    async def agent(task: AgentTask) -> None:
        try:
            await solve(task)
        except openai.BadRequestError as error:
            errors.append(error)
            with pytest.raises(openai.BadRequestError):
                await asked(task, task.messages)
            raise

    trajectory = played(Engine(*texts), agent, **limits)
    assert (trajectory.finish_reason, trajectory.final_text) == (reason, "")
    assert [error.code for error in errors] == ([code] if code else [])


def test_a_sequence_holds_what_a_micro_batch_does() -> None:
    """Its prompt may be longer than those of the data; with its responses it may not."""
    limits = EpisodeLimits(5, None, 100, 1000, max_prompt_tokens=50)
    assert [limits.end(prompt) for prompt in (30, 50, 80)] == [130, 150, 150]

    async def agent(task: AgentTask) -> str:
        with pytest.raises(openai.BadRequestError, match="exceeds the maximum context length of the run"):
            await asked(task, [{"role": "user", "content": "x" * 400}])
        return "mine"

    trajectory = played(Engine("one"), asks_first(agent), max_response_tokens=100, max_prompt_tokens=200)
    assert (trajectory.finish_reason, trajectory.final_text) == ("length", "mine")


def asks_first(agent: Callable[[AgentTask], Any]) -> Agent:
    async def asking(task: AgentTask) -> Any:
        await asked(task, task.messages)
        return await agent(task)

    return asking


def test_an_answer_that_is_cut_ends_with_length() -> None:
    async def agent(task: AgentTask) -> None:
        async with client_of(task) as client:
            done = await client.chat.completions.create(model=task.model, messages=QUESTION, max_completion_tokens=2)  # type: ignore[arg-type]
        assert done.choices[0].finish_reason == "length" and done.usage
        assert (done.usage.completion_tokens, done.choices[0].message.content) == (2, "ab")

    engine = Engine("abcdef")
    trajectory = played(engine, agent)
    assert (trajectory.finish_reason, trajectory.final_text, engine.read[0][1]) == ("length", "ab", 2)


def test_a_text_to_stop_at_is_not_shown_and_is_trained_on() -> None:
    async def agent(task: AgentTask) -> None:
        first = await asked(task, QUESTION, stop=["Observation:"])
        assert first.content == "look "
        await asked(task, [*QUESTION, first, {"role": "user", "content": "1"}])

    trajectory = played(Engine("look Observation: 5", "1"), agent)
    assert sequences(trajectory) == [
        "<|im_start|>user\nWhat is 1?<|im_end|>\n<|im_start|>assistant\nlook Observation:<|im_end|>\n"
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n1<|im_end|>"
    ]
    assert sampled(trajectory)[0] == "look Observation:"


def test_calls_that_the_agent_answers_itself_are_recorded() -> None:
    async def agent(task: AgentTask) -> None:
        message = await asked(task, task.messages, tools=task.tools)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "mine"}
        await asked(task, [*task.messages, message, result], tools=task.tools)
        malformed = await asked(task, QUESTION, tools=task.tools)
        assert (malformed.content, malformed.tool_calls) == ("<tool_call>", None)

    trajectory = played(Engine(CALL, "1", "<tool_call>"), agent)
    call = trajectory.tool_calls[0]
    assert (call.turn, call.name, call.status, call.output) == (
        1, "code_interpreter", "success", "mine"
    )  # fmt: skip
    assert [c.status for c in trajectory.tool_calls] == ["success", "parse_error"]


class Trouble(Exception):
    pass


def failing(error: BaseException) -> Agent:
    async def agent(task: AgentTask) -> None:
        await asked(task, task.messages)
        raise error

    return agent


def failing_in_a_thread(error: BaseException) -> Agent:
    def agent(task: AgentTask) -> None:
        raise error

    return agent


@pytest.mark.parametrize("make", [failing, failing_in_a_thread])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Trouble("here"), "here"),
        (KeyboardInterrupt(), "the agent raised KeyboardInterrupt"),
        (SystemExit(3), "the agent raised SystemExit"),
        (asyncio.CancelledError(), "the agent raised CancelledError"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_what_an_agent_raises_fails_the_episode(
    make: Callable[[BaseException], Agent], error: BaseException, message: str
) -> None:
    with pytest.raises((Trouble, ExtensionError, RuntimeError), match=message):
        played(Engine("one"), make(error))


def test_a_cancelled_future_in_a_plain_agent_is_no_cancellation_of_ours() -> None:
    with pytest.raises(ExtensionError, match="the agent raised CancelledError"):
        played(Engine("one"), failing_in_a_thread(concurrent.futures.CancelledError()))


def test_an_agent_that_is_late_or_does_nothing_is_named() -> None:
    async def late(task: AgentTask) -> None:
        await asyncio.sleep(60)

    def late_in_a_thread(task: AgentTask) -> None:
        time.sleep(3)

    async def silent(task: AgentTask) -> str:
        return "nothing"

    async def wrong(task: AgentTask) -> int:
        await asked(task, task.messages)
        return 5

    for agent in (late, late_in_a_thread):
        with pytest.raises(
            TimeoutError, match=r"endpoint_stand:tried has not ended after 0\.2 s \(rollout\.endpoint\.time"
        ):
            played(Engine(), agent, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="endpoint_stand:tried ended without an answer of the model"):
        played(Engine(), silent)
    with pytest.raises(
        TypeError, match="endpoint_stand:tried returned a int; return the final answer as a text, or None"
    ):
        played(Engine("one"), wrong)


def test_what_breaks_under_an_agent_is_raised_whatever_it_makes_of_it() -> None:
    async def forgiving(task: AgentTask) -> str:
        try:
            await solve(task)
        except Exception:
            await asyncio.sleep(0)
        return "fine"

    with pytest.raises(Trouble, match="broken"):
        played(Engine(Trouble("broken")), forgiving)
    with pytest.raises(ToolUnavailable, match="prompt 'p' sample 0: the tool is unavailable: gone"):
        played(Engine(CALL), forgiving, tool=Tool(ToolUnavailable("gone")))


def test_a_token_ends_with_its_agent() -> None:
    tasks: list[AgentTask] = []

    async def agent(task: AgentTask) -> None:
        tasks.append(task)
        await asked(task, task.messages)

    async def run() -> None:
        stand = Stand(Engine("one", "two"), agent)
        try:
            for _ in range(2):
                await stand.trajectory()
            assert tasks[0].api_key != tasks[1].api_key and tasks[0].base_url == tasks[1].base_url
            for task in tasks:
                with pytest.raises(openai.AuthenticationError, match="no conversation has this API key"):
                    await asked(task, QUESTION)
        finally:
            await stand.environment.aclose()

    asyncio.run(run())


class Maker:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    async def __call__(self, task: AgentTask) -> None: ...


class NoAgent:
    pass


NOT_CALLABLE = 3


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("solve", {}, ""),
        ("solve", {"steps": 3}, "unexpected keyword argument 'steps'"),
        ("Maker", {"steps": 3}, ""),
        ("Maker", {}, "missing a required argument: 'steps'"),
        ("NoAgent", {}, "is a class without __call__"),
        ("NOT_CALLABLE", {}, "is neither a function nor a class"),
    ],
)
def test_agents_that_are_refused(name: str, arguments: dict[str, Any], problem: str) -> None:
    agent = Extension(name=f"tests.environments.test_endpoint:{name}", arguments=arguments)
    if not problem:
        return check_agent(agent)
    with pytest.raises(ExtensionError, match=problem):
        check_agent(agent)


def test_a_history_that_ends_with_the_models_own_answer_is_rendered() -> None:
    async def again(task: AgentTask) -> None:
        first = await asked(task, task.messages)
        await asked(task, [*task.messages, first])

    trajectory = played(Engine("one", "two"), again)
    assert sampled(trajectory) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_call_with_half_a_character_stays_text() -> None:
    half = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "\\ud83d"}}</tool_call>'
    trajectory = played(Engine(half), solve)
    assert [call.status for call in trajectory.tool_calls] == ["parse_error"]
    assert sampled(trajectory) == [f"{half}<|im_end|>"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("127.0.0.1", "127.0.0.1")),
        ({"NO_PROXY": "corp"}, ("corp,127.0.0.1", "corp,127.0.0.1")),
        ({"no_proxy": "a", "NO_PROXY": "b"}, ("a,127.0.0.1", "b,127.0.0.1")),
        ({"no_proxy": "*"}, ("*", "*")),
    ],
)
def test_hosts_without_a_proxy_stay(given: dict[str, str], wanted: tuple[str, str], monkeypatch: Any) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that both are restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []

    async def agent(task: AgentTask) -> None:
        seen.append((os.environ["no_proxy"], os.environ["NO_PROXY"]))
        await asked(task, task.messages)

    played(Engine("one"), agent)
    assert seen == [wanted]


class Stubborn(Engine):
    """Does not end when its call is cancelled."""

    began = False

    async def __call__(self, token_ids: Sequence[int], **options: Any) -> ModelTurn:
        self.began = True
        for pause in (3600, 2):  # it is cancelled when its client is gone, and when its agent has ended
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(pause)
        await asyncio.sleep(2)
        return await super().__call__(token_ids, **options)


@pytest.mark.parametrize("fails", [True, False])
def test_a_late_call_does_not_hide_what_ended_the_agent(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ctpo_megatron.environments.endpoint._CLOSING_S", 0.2)

    engine = Stubborn("one")

    async def ends(task: AgentTask) -> str:
        call = asyncio.create_task(asked(task, task.messages))
        while not engine.began:
            await asyncio.sleep(0.01)
        call.cancel()
        if fails:
            raise ValueError("of the agent")
        return "done"

    with pytest.raises(
        ValueError if fails else TimeoutError, match="of the agent" if fails else "1 calls of the model"
    ):
        played(engine, ends)
    assert ("1 calls of the model have not ended" in caplog.text) == fails
