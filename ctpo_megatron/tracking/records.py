"""What readers of a dump get, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
"""A trajectory as JSON lines have it: `Trajectory.to_json`, and the fields that `write_trajectories` adds."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a reader chooses trajectories by.

    place: in the dump. cause: of having no verdict; empty for one. tools: the statuses of its calls, each once, in
    order of the alphabet, with spaces between. traced: it has `log_ratio`.
    """

    place: int
    prompt_id: str
    sample_index: int
    reward: float | None
    cause: str
    finish_reason: str
    tools: str
    model_tokens: int
    traced: bool


def head_of(place: int, record: Record) -> Head:
    """The head of a whole record."""
    return Head(
        place,
        record["prompt_id"],
        record["sample_index"],
        record["reward"],
        (record.get("no_verdict") or {}).get("cause", ""),
        record.get("finish_reason") or "",
        statuses(call["status"] for call in record["tool_calls"]),
        sum(record["response_mask"]),
        "log_ratio" in record,
    )


def statuses(found: Iterable[str]) -> str:
    """`Head.tools` of the statuses of calls."""
    return " ".join(sorted(set(found)))


def texts_in(record: Record) -> list[str]:
    """Its texts that are searched: prompt, turns and observations, then outputs of tools."""
    return [*(part["text"] for part in record["segments"]), *(call["output"] for call in record["tool_calls"])]
