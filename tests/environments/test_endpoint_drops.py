"""Only what an agent has received counts, and nothing changes after its end."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from ctpo_megatron.data import Trajectory
from ctpo_megatron.environments import (
    AgentTask,
    Episode,
    EpisodeOver,
    MessageTemplate,
    ModelTurn,
    PythonTool,
    ToolResult,
)
from tests.environments.endpoint_stand import (
    END,
    QUESTION,
    Engine,
    Stand,
    asked,
    client_of,
    ids_of,
    played,
    sampled,
    sequences,
)
from tests.support.deadlines import scaled


class Late(Engine):
    """Says one text after another, each after its own delay in seconds, then the last one; notes what was cancelled."""

    def __init__(self, *texts: tuple[str, float]) -> None:
        super().__init__(*(text for text, _ in texts))
        self.delays = [delay for _, delay in texts]
        self.cancelled = 0

    async def __call__(self, token_ids: Sequence[int], **options: Any) -> ModelTurn:
        delay = self.delays.pop(0) if len(self.texts) > 1 else self.delays[0]
        self.texts += self.texts[-1:] if len(self.texts) == 1 else []
        said = await super().__call__(token_ids, **options)
        try:
            await asyncio.sleep(delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return said


def request(task: AgentTask, messages: Any) -> bytes:
    body = json.dumps({"messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {task.api_key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def connected(task: AgentTask) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = task.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    return await asyncio.open_connection(host, int(port))


async def until(condition: Any) -> None:
    async with asyncio.timeout(scaled(10)):
        while not condition():
            await asyncio.sleep(0.01)


async def dropped(task: AgentTask, messages: Any, engine: Engine) -> None:
    """A call that is given up while the model answers it."""
    before = len(engine.read)
    call = asyncio.create_task(asked(task, messages))
    await until(lambda: len(engine.read) > before)
    call.cancel()
    await asyncio.wait([call])


def test_a_dropped_call_is_cancelled_and_does_not_count() -> None:
    """Neither in the loss nor as the final text, nor among the calls of `max_turns`."""
    engine = Late(("never read", 60), ("one", 0), ("never read", 60), ("two", 0))

    async def impatient(task: AgentTask) -> None:
        history: list[Any] = [*task.messages]
        for _ in range(2):
            await dropped(task, history, engine)
            said = await asked(task, history)  # at once, while the server may not know yet
            history += [said, {"role": "user", "content": "Sure?"}]

    trajectory = played(engine, impatient, max_turns=2)
    assert sampled(trajectory) == ["one<|im_end|>", "two<|im_end|>"]
    assert (trajectory.final_text, trajectory.finish_reason, trajectory.turns) == ("two", "answer", 2)
    assert engine.cancelled == 2 and "never" not in "".join(sequences(trajectory))


def test_an_answer_that_comes_after_the_agent_has_gone_on_does_not_count() -> None:
    engine = Late(("never read", 0.6), ("one", 1.0))

    async def impatient(task: AgentTask) -> None:
        await dropped(task, QUESTION, engine)
        await asked(task, [{"role": "user", "content": "Other?"}])

    trajectory = played(engine, impatient, max_turns=1)
    assert (sampled(trajectory), trajectory.final_text) == (["one<|im_end|>"], "one")
    assert ["What is 1?" in text for text in sequences(trajectory)] == [False]  # nor does its question


def test_a_call_that_is_under_way_when_the_agent_ends_leaves_nothing() -> None:
    async def impatient(task: AgentTask) -> str:
        first = await asked(task, task.messages)
        with pytest.raises(TimeoutError):
            more = [*task.messages, first, {"role": "user", "content": "Sure?"}]
            await asyncio.wait_for(asked(task, more), 0.5)
        return "done"

    trajectory = played(Late(("one", 0), ("never read", 60)), impatient)
    assert (sampled(trajectory), trajectory.final_text) == (["one<|im_end|>"], "done")
    assert ["Sure?" in text for text in sequences(trajectory)] == [False]


def test_retries_of_openais_client_are_fresh_calls() -> None:
    engine = Late(("never read", 60), ("never read", 60), ("one", 0))

    async def stock(task: AgentTask) -> None:
        await retried(task, QUESTION, times=4)

    trajectory = played(engine, stock, max_turns=1)
    assert (sampled(trajectory), trajectory.final_text) == (["one<|im_end|>"], "one")
    assert engine.cancelled >= 2 and len({seed for *_, seed in engine.read}) == len(engine.read)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the standard library, or that of Ray's actors, which writes later."""
    if request.param == "asyncio":
        yield
        return
    asyncio.set_event_loop_policy(pytest.importorskip("uvloop").EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(None)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("size", [10, 30_000_000], ids=["short", "more than the connection holds"])
def test_an_answer_that_cannot_be_written_does_not_count(size: int) -> None:
    """The client is gone, and the event loop does not know before it writes; or it leaves amid the answer."""
    ready, gone = threading.Event(), threading.Event()

    class Long(MessageTemplate):
        """Makes a long text of the first answer, which takes until the client is gone."""

        def decode(self, token_ids: Sequence[int]) -> str:
            text = super().decode(token_ids)
            if text != "never read":
                return text
            ready.set()
            if size < 1000 and not gone.wait(scaled(20)):  # blocks the loop, as other work of the engine does
                raise TimeoutError
            return "x" * size

    def leaves(task: AgentTask) -> None:
        host, port = task.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        client = socket.create_connection((host, int(port)), timeout=scaled(20))
        client.sendall(request(task, QUESTION))
        if size > 1000:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert ready.wait(scaled(20))
        client.close()
        gone.set()
        with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as stock:
            said = stock.chat.completions.create(model=task.model, messages=QUESTION)  # type: ignore[arg-type]
        assert said.choices[0].message.content == "one"

    trajectory = played(Engine("never read", "one"), leaves, codec=Long, max_turns=1)
    assert (sampled(trajectory), trajectory.final_text) == (["one<|im_end|>"], "one")


def test_a_client_that_leaves_within_its_request_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def leaves(task: AgentTask) -> None:
        for abort in (True, False):
            _, writer = await connected(task)
            writer.write(request(task, QUESTION)[:-5])
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.transport.abort() if abort else writer.close()
        await asyncio.sleep(0.3)
        await asked(task, QUESTION)

    assert sampled(played(Engine("one"), leaves)) == ["one<|im_end|>"]
    assert "Traceback" not in "".join(capfd.readouterr())


class Random(Engine):
    """Answers each question with its own words after a random time, or when it is let."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    async def __call__(self, token_ids: Sequence[int], **options: Any) -> ModelTurn:
        text = f"answer {len(self.read)}"
        self.texts.append(text)
        number = len(self.read)
        self.read.append((list(token_ids), options["max_tokens"], options["seed"]))
        await asyncio.sleep(self.random.choice([0, 0, 0.01, 0.05, 60]))
        ids = [*ids_of(text), END]
        return ModelTurn(
            ids, [-0.5 - number - i / 100 for i in range(len(ids))], [number + i % 2 for i in range(len(ids))]
        )


async def retried(task: AgentTask, messages: Any, times: int = 2) -> Any:
    """The message that answers a call of OpenAI's client or one of its retries."""
    options = {"base_url": task.base_url, "api_key": task.api_key, "timeout": scaled(0.6), "max_retries": times}
    async with openai.AsyncOpenAI(**options) as client:
        done = await client.chat.completions.create(model=task.model, messages=messages)
    return done.choices[0].message


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_that_was_received_is_in_one_sequence(seed: int) -> None:
    """Random agents: concurrent calls, histories that are continued or changed, calls that are dropped, and retries.

    An agent that leaves while an answer is on its way cannot tell whether it would have had it; these wait until no
    answer can come, or for the whole of it.
    """
    rng, received = random.Random(seed), list[str]()
    engine = Random(seed)

    async def call(task: AgentTask, history: list[Any]) -> Any:
        while True:
            try:
                if rng.random() < 0.7:
                    said = await asyncio.wait_for(asked(task, history), scaled(0.6))
                else:
                    said = await retried(task, history)
            except (TimeoutError, openai.APITimeoutError):  # only those that would take a minute
                continue
            received.append(said.content)
            return said

    async def one(task: AgentTask, name: int) -> None:
        history: list[Any] = [*QUESTION] if rng.random() < 0.5 else [{"role": "user", "content": f"I am {name}."}]
        for _ in range(rng.randint(1, 4)):
            said = await call(task, history)
            if rng.random() < 0.2:
                said = {"role": "assistant", "content": said.content + "!"}
            history += [said, {"role": "user", "content": rng.choice(["And?", "Sure?"])}]

    async def agent(task: AgentTask) -> None:
        await asyncio.gather(*(one(task, name) for name in range(rng.randint(1, 5))))

    trajectory = played(engine, agent, max_turns=50, max_model_len=20000, max_response_tokens=10000)
    assert_exact(trajectory, engine, received)


def assert_exact(trajectory: Trajectory, engine: Random, received: list[str]) -> None:
    turns = sampled(trajectory)
    assert Counter(turns) == Counter(f"{text}<|im_end|>" for text in received)
    assert len(set(received)) == len(received) == trajectory.turns
    where = {f"{text}<|im_end|>": number for number, text in enumerate(engine.texts)}
    tokens = trajectory.tokens
    for turn, text in enumerate(turns, start=1):
        (rows,) = ((tokens["turn"] == turn) & (tokens["response_mask"] == 1)).nonzero()
        assert list(rows) == list(range(rows[0], rows[0] + len(rows)))  # in one place of one sequence
        (sequence,) = [part for part in trajectory.sequences if part.start <= rows[0] < part.stop]
        number = where[text]
        assert tokens["token_ids"][rows].tolist() == [*ids_of(engine.texts[number]), END]
        assert tokens["token_ids"][sequence.start : rows[0]].tolist() == engine.read[number][0]
        assert tokens["loss_mask"][rows].all()
        assert tokens["weight_version"][rows].tolist() == [number + i % 2 for i in range(len(rows))]
        assert tokens["rollout_log_probs"][rows].tolist() == pytest.approx(
            [-0.5 - number - i / 100 for i in range(len(rows))], rel=1e-6
        )
    assert int(tokens["response_mask"].sum()) == sum(len(ids_of(text)) + 1 for text in received)


class Counting:
    """A tool that takes a while, or until it is let."""

    schema = PythonTool.schema

    def __init__(self, seconds: float = 0.2) -> None:
        self.seconds, self.begun, self.ended = seconds, 0, 0

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        self.begun += 1
        await asyncio.sleep(self.seconds)
        self.ended += 1
        return ToolResult("1")


def calls_of(count: int) -> list[dict[str, Any]]:
    function = {"name": "code_interpreter", "arguments": json.dumps({"code": "print(1)"})}
    return [{"id": f"mine_{number}", "type": "function", "function": function} for number in range(count)]


def test_a_tool_that_ends_after_its_agent_changes_nothing() -> None:
    tool, errors = Counting(0.3), list[BaseException]()
    tasks: list[asyncio.Task[Any]] = []

    async def agent(task: AgentTask) -> str:
        await asked(task, QUESTION)

        async def late() -> None:
            for call in calls_of(2):
                try:
                    await task.call_tool(call)
                except Exception as error:
                    errors.append(error)

        tasks.append(asyncio.create_task(late()))
        await until(lambda: tool.begun)
        return "done"

    async def run() -> tuple[Trajectory, Any]:
        stand = Stand(Engine("one"), agent, tool=tool)
        try:
            trajectory = await stand.trajectory()
            before = copy.deepcopy(trajectory)
            await asyncio.wait_for(asyncio.gather(*tasks), scaled(20))
            return trajectory, before
        finally:
            await stand.environment.aclose()

    trajectory, before = asyncio.run(run())
    assert (tool.begun, tool.ended) == (1, 1)
    assert trajectory == before and trajectory.tool_calls == []
    said = "environment: the episode is finished; nothing is run or recorded after its end"
    assert [str(error) for error in errors] == [said] * 2


@pytest.mark.parametrize("limit", [1, 2])
def test_calls_of_tools_count_when_they_begin(limit: int) -> None:
    tool = Counting()

    async def agent(task: AgentTask) -> str:
        await asked(task, QUESTION)
        done = await asyncio.gather(*(task.call_tool(call) for call in calls_of(20)), return_exceptions=True)
        assert [type(each) for each in done] == [str] * limit + [EpisodeOver] * (20 - limit)
        return "done"

    trajectory = played(Engine("one"), agent, tool=tool, max_tool_calls=limit)
    assert (tool.begun, len(trajectory.tool_calls), trajectory.finish_reason) == (limit, limit, "tool_budget")


def test_calls_of_the_model_count_when_they_begin() -> None:
    async def agent(task: AgentTask) -> str:
        questions = [[{"role": "user", "content": str(number)}] for number in range(6)]
        done = await asyncio.gather(*(asked(task, each) for each in questions), return_exceptions=True)
        assert sorted(type(each).__name__ for each in done) == ["BadRequestError"] * 4 + ["ChatCompletionMessage"] * 2
        return "done"

    engine = Late(("one", 0.2), ("two", 0.3))
    trajectory = played(engine, agent, max_turns=2)
    assert (len(engine.read), trajectory.turns, trajectory.finish_reason) == (2, 2, "max_turns")


def test_an_environment_cannot_end_an_episode_while_it_samples() -> None:
    class Hasty:
        async def run(self, episode: Episode) -> None:
            turn = asyncio.create_task(episode.generate())
            await asyncio.sleep(0.05)
            try:
                with pytest.raises(RuntimeError, match="while a turn is being sampled; await the turn, or cancel it"):
                    episode.finish("early")
            finally:
                episode.finish((await turn).text)

    async def run() -> Trajectory:
        return await Stand(Late(("one", 0.2)), client_of).trajectory(Hasty())

    assert asyncio.run(run()).final_text == "one"
