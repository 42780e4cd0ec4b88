"""An agent's episode with a model that is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

from ctpo_megatron.config import EndpointConfig, Extension
from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.environments import (
    AgentTask,
    EndpointEnvironment,
    Episode,
    EpisodeLimits,
    HermesParser,
    MessageTemplate,
    ModelTurn,
    PythonTool,
    Toolbox,
    ToolResult,
    play,
)
from tests.engines.tiny_model import tiny_tokenizer
from tests.support.deadlines import scaled

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>tools\n' }}"
    "{%- for tool in tools %}{{- tool.function.name + '\n' }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TOKENIZER = tiny_tokenizer(TEMPLATE)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TOOLS = [PythonTool.schema]
QUESTION = [{"role": "user", "content": "What is 1?"}]
Agent = Callable[[AgentTask], Any]


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False))


class Engine:
    """Says one text after another, each with an end token unless it is cut; notes what it read."""

    def __init__(self, *texts: str | BaseException) -> None:
        self.texts = list(texts)
        self.read: list[tuple[list[int], int, int]] = []

    async def __call__(
        self, token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int = 0, stop: Sequence[str] = ()
    ) -> ModelTurn:
        self.read.append((list(token_ids), max_tokens, seed))
        text = self.texts.pop(0)
        await asyncio.sleep(0)
        if isinstance(text, BaseException):
            raise text
        ends = [text.find(string) + len(string) for string in stop if string in text]
        ids = (ids_of(text[: min(ends)]) if ends else [*ids_of(text), END])[:max_tokens]
        n = len(self.read)
        return ModelTurn(ids, [-0.5 * n] * len(ids), [n + 6] * len(ids))


class InPairs(Engine):
    """Answers a call when another one waits for its answer, too."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.both = asyncio.Barrier(2)

    async def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        said = await super().__call__(*arguments, **keywords)
        await self.both.wait()
        return said


class Tool:
    """Answers always the same; raises it if it is an error."""

    schema = PythonTool.schema

    def __init__(self, answer: ToolResult | BaseException = ToolResult("1")) -> None:  # noqa: B008 - it is immutable
        self.answer = answer

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Stand:
    """An environment with a scripted model, and the last trajectory that it gave."""

    def __init__(
        self,
        engine: Engine,
        agent: Agent,
        timeout_s: float = 60.0,
        tool: Any = None,
        shown: bool = True,
        codec: type[MessageTemplate] = MessageTemplate,
    ) -> None:
        self.engine, self.tool, self.shown, self.codec = engine, tool or Tool(), TOOLS if shown else [], codec
        globals()["tried"] = agent  # as a configuration names it
        config = EndpointConfig(agent=Extension(name=f"{__name__}:tried"), timeout_s=timeout_s)
        self.environment = EndpointEnvironment(config, TOOLS if shown else [])

    async def trajectory(self, environment: Any = None, **limits: Any) -> Trajectory:
        settings = {"max_turns": 8, "max_turn_tokens": None, "max_response_tokens": 2000, "max_model_len": 4000}
        codec = self.codec(TOKENIZER, {}, [END], TOOLS)
        prompt = Prompt(
            "p", "source", tuple(QUESTION), "1", tuple(codec.conversation(QUESTION, self.shown)), {"level": 3}
        )
        episode = Episode(
            prompt,
            Trajectory("p", 0, 1234),
            engine=self.engine,
            codec=codec,
            tools=Toolbox([self.tool], HermesParser(), 200),
            limits=EpisodeLimits(**(settings | limits)),
        )
        return await play(environment or self.environment, episode)


def played(
    engine: Engine,
    agent: Agent,
    *,
    timeout_s: float = 60.0,
    tool: Any = None,
    shown: bool = True,
    codec: type[MessageTemplate] = MessageTemplate,
    **limits: Any,
) -> Trajectory:
    """The trajectory of an episode in which `agent` talks to a model that is scripted."""

    async def run() -> Trajectory:
        stand = Stand(engine, agent, timeout_s, tool, shown, codec)
        try:
            return await stand.trajectory(**limits)
        finally:
            await stand.environment.aclose()

    # As in an engine, whose event loop is not in the main thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(asyncio.wait_for(run(), scaled(60)))).result()


def client_of(task: AgentTask) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


async def asked(task: AgentTask, messages: Any, **options: Any) -> Any:
    """The message that answers."""
    async with client_of(task) as client:
        done = await client.chat.completions.create(model=task.model, messages=messages, **options)
    return done.choices[0].message


async def solve(task: AgentTask) -> str | None:
    """Calls tools until there is an answer, as the built-in environment does."""
    messages: list[Any] = [*task.messages]
    while True:
        message = await asked(task, messages, tools=task.tools)
        messages.append(message)
        if not message.tool_calls:
            return None
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": await task.call_tool(call)})


def sequences(trajectory: Trajectory) -> list[str]:
    return [text_of(trajectory.token_ids[part]) for part in trajectory.sequences]


def sampled(trajectory: Trajectory) -> list[str]:
    """What the model said in each turn."""
    columns = [*zip(trajectory.token_ids, trajectory.turn, trajectory.response_mask, strict=True)]
    turns = range(1, trajectory.turns + 1)
    return [text_of([token for token, of, by_model in columns if by_model and of == turn]) for turn in turns]
