"""The heartbeat file of a run: from its age and content whoever looks from outside tells whether the run lives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

HEARTBEAT_FILE = "heartbeat.json"


@dataclass(frozen=True)
class Heartbeat:
    """What rank zero writes every few seconds.

    state: `running`; `ended` and `failed` are last words, which a run that was killed does not have. phase: of rank
    zero, e.g. `rl/step/update`. time, progress: seconds since the epoch by rank zero's clock: when this was written,
    and when any rank last began or ended a phase. stalls: how often the stacks were dumped since the start.
    """

    state: Literal["running", "ended", "failed"]
    step: int
    phase: str
    time: float
    progress: float
    stalls: int
    ranks: int
    pid: int
    host: str

    def write(self, directory: Path) -> None:
        """Replace the file of a run directory; a reader sees the old one or the new one."""
        aside = directory / f"{HEARTBEAT_FILE}.tmp"
        aside.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        aside.replace(directory / HEARTBEAT_FILE)


def read_heartbeat(directory: Path) -> Heartbeat | None:
    """The heartbeat of a run directory; None when it has none yet."""
    path = Path(directory) / HEARTBEAT_FILE
    return Heartbeat(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
