"""What readers of a dump get, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
"""A trajectory as JSON lines have it: `Trajectory.to_json`, and the fields that `write_trajectories` adds."""


@dataclass(frozen=True)
class Head:
    """What a reader chooses trajectories by. place: in the dump. traced: it has `log_ratio`."""

    place: int
    prompt_id: str
    reward: float | None
    traced: bool
