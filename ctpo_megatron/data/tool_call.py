"""ToolCall: what an episode keeps of one call of a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

ToolStatus = Literal["success", "runtime_error", "timeout", "parse_error", "infrastructure_error"]
TOOL_STATUSES: tuple[ToolStatus, ...] = get_args(ToolStatus)


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
