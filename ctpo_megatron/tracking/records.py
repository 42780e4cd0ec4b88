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


@dataclass(frozen=True, slots=True)
class Times:
    """When calls of tools and the scoring of one trajectory began and ended, as Unix times in seconds."""

    tools: list[tuple[float, float]]
    scoring: list[tuple[float, float]]


def times_in(record: Record) -> Times:
    """Its times; those that an earlier version did not record are missing."""
    calls = [call for call in record["tool_calls"] if call.get("began_at") is not None]
    scored = record.get("scored_at")
    return Times(
        [(call["began_at"], call["began_at"] + call["wall_s"]) for call in calls],
        [] if scored is None else [(scored[0], scored[1])],
    )


def texts_in(record: Record) -> list[str]:
    """Its texts that are searched: prompt, turns and observations, then outputs of tools."""
    return [*(part["text"] for part in record["segments"]), *(call["output"] for call in record["tool_calls"])]
