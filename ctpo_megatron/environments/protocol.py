"""What users can replace: a tool, the parser of its calls, and the environment that plays an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ctpo_megatron.data.trajectory import ToolCall
    from ctpo_megatron.environments.episode import Episode

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
    """A call as the model wrote it; whether there is such a tool with such arguments is checked afterwards."""

    name: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answers: the text that the model is shown (cut to `rollout.max_observation_chars`).

    exec_s: seconds that it ran, queueing excluded; None where the tool does not know.
    """

    text: str
    status: Literal["success", "timeout", "runtime_error"] = "success"
    exec_s: float | None = None


class ParseError(ValueError):
    """A tool call that cannot be read or run as it is written; the message is shown to the model."""


class ToolUnavailable(Exception):
    """A tool or service failed through no fault of the model: the whole group is sampled again."""


class Tool(Protocol):
    """Made once in each engine process; its calls run concurrently.

    schema: of the class, as it is read without making the tool. Arguments are checked against it before the call.
    """

    schema: ClassVar[Schema]

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        """Run one call. Raises ToolUnavailable; any other exception also loses the group."""
        ...


class ToolParser(Protocol):
    """Reads the calls of a model turn and says how the answers are shown. Made once in each engine process.

    A parser may also have these attributes, of the class or the object:
    system_prompt: text that explains it to the model, where `data.system_prompt` is null; else there is none.
    schemas_in_prompt: whether the chat template is given the tools, where `data.tool_in_prompt` is null; else it is.
    example: a turn with one call, which `ctpo doctor CONFIG --template` renders.
    """

    def mentions_call(self, text: str) -> bool:
        """Whether a turn must be read as tool calls, well-formed or not."""
        ...

    def parse(self, text: str) -> list[ToolCallRequest]:
        """The calls of a turn (text without the end token), in order. Raises ParseError."""
        ...

    def render(self, calls: Sequence[ToolCall]) -> list[Message]:
        """The messages that show the `output` of each call to the model."""
        ...


@runtime_checkable
class StoppingParser(ToolParser, Protocol):
    """A parser that ends turns in which the model goes on after its call.

    stop: sampling pauses behind each of these strings. What was sampled stays; what would follow never is.
    """

    stop: Sequence[str]

    def ends_turn(self, text: str) -> bool:
        """Whether a turn that has paused behind `text` is over; if not, the model goes on."""
        ...


class Environment(Protocol):
    """Plays episodes, many at once: what belongs to one episode is kept in local variables."""

    async def run(self, episode: Episode) -> None:
        """Play `episode` to its end (`episode.finish`). Raises ToolUnavailable to have the group sampled again."""
        ...
