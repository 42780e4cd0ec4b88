"""Protocols that users can implement: a tool, the parser of its calls, and the environment of an episode.

A parser reads a turn `without_thinking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ctpo_megatron.data.records import ToolCall
    from ctpo_megatron.environments.episode import Episode

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""The tags around a model's thinking."""

Schema = Mapping[str, Any]
"""An OpenAI function schema, as chat templates expect it in `tools=[...]`."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message that the model did not write. name: of the tool that answers, for role "tool"."""

    role: str
    content: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallRequest:
    """A call as the model wrote it; its tool and arguments are checked afterwards."""

    name: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool: the text shown to the model (cut to `rollout.max_observation_chars`).

    exec_s: seconds of execution without queueing; None if unknown.
    """

    text: str
    status: Literal["success", "timeout", "runtime_error"] = "success"
    exec_s: float | None = None


class ParseError(ValueError):
    """A tool call that cannot be parsed or run; the message is shown to the model."""


class ToolUnavailable(Exception):
    """A tool or service failed through no fault of the model: the whole group is sampled again."""


class Tool(Protocol):
    """Created once in each engine process; its calls run concurrently.

    schema: a class attribute, since it is read without an instance. Arguments are checked against it before the call.
    """

    schema: ClassVar[Schema]

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        """Run one call. Raises ToolUnavailable; any other exception also fails the group."""
        ...


class ToolParser(Protocol):
    """Parses the calls of a model turn and renders their answers. Created once in each engine process.

    A parser may also have these attributes, of the class or the object:
    system_prompt: text that explains the format to the model, used if `data.system_prompt` is null; default none.
    schemas_in_prompt: whether the chat template receives the tools if `data.tool_in_prompt` is null; default true.
    example: a turn with one call, which `ctpo doctor CONFIG --template` renders.
    said(text): what a turn says besides its calls, for agents of one's own; default nothing.
    """

    def mentions_call(self, text: str) -> bool:
        """Return whether a turn must be read as tool calls, well-formed or not."""
        ...

    def parse(self, text: str) -> list[ToolCallRequest]:
        """Return the calls of a turn (text without the end token), in order. Raises ParseError."""
        ...

    def render(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the messages that show the `output` of each call to the model."""
        ...


@runtime_checkable
class StoppingParser(ToolParser, Protocol):
    """A parser that ends turns in which the model continues after its call.

    stop: sampling pauses after each of these strings. Sampled tokens are kept.
    """

    stop: Sequence[str]

    def ends_turn(self, text: str) -> bool:
        """Return whether a turn that paused after `text` is over; if not, the model continues."""
        ...


class Environment(Protocol):
    """Runs episodes, many concurrently: keep the state of an episode in local variables."""

    async def run(self, episode: Episode) -> None:
        """Run `episode` to its end (`episode.finish`). Raises ToolUnavailable to have the group sampled again."""
        ...


def left_open(context: str) -> str:
    """Return the `<think>` tag that a prompt ends with; "" without one."""
    return THINK_OPEN if context.rstrip().endswith(THINK_OPEN) else ""


def without_thinking(text: str) -> str:
    """Return the part of a model turn that is parsed for tool calls: all but thinking at its beginning.

    Unfinished thinking is the whole turn.
    """
    return text.partition(THINK_CLOSE)[2] if text.lstrip().startswith(THINK_OPEN) else text
