"""Records of an episode besides its tokens: its prompt, its tool calls, and why it has no reward. No numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ToolStatus = Literal["success", "runtime_error", "timeout", "parse_error", "infrastructure_error"]
TOOL_STATUSES: tuple[ToolStatus, ...] = get_args(ToolStatus)

MissingCause = Literal["timeout", "exception", "crash", "none", "not_finite"]
"""Why there is no verdict: the reward function took too long, raised, its process died, or it returned None or a figure
that is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, rendered with the model's chat template up to the start of the model's turn."""

    id: str
    data_source: str
    messages: tuple[dict[str, str], ...]
    answer: str
    token_ids: tuple[int, ...]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ToolCall:
    """One tool call of an episode. `output` is the observation text as the model saw it.

    name, arguments: empty when the call could not be read (status "parse_error"). wall_s: seconds from the call to its
    answer. exec_s: seconds of execution, as reported by the tool's service; None if unknown. began_at: Unix time of the
    call in seconds; None for what was never called, and in earlier recordings.
    """

    turn: int
    name: str
    arguments: dict[str, Any]
    status: ToolStatus
    output: str
    wall_s: float
    exec_s: float | None = None
    began_at: float | None = None

    @property
    def queue_s(self) -> float | None:
        """Seconds of queueing and transfer; None if `exec_s` is unknown."""
        return None if self.exec_s is None else max(0.0, self.wall_s - self.exec_s)


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """Stands for the reward of a trajectory that was not judged. reason: one line for people."""

    cause: MissingCause
    reason: str


class Unreachable(NoVerdict):
    """An exception of a connection: what the reward function asks may be up at the next call."""
