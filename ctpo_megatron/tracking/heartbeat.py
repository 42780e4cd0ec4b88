"""The heartbeat file of a run: its age and content show other programs whether the run is alive."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.run_paths import RunPaths


@dataclass(frozen=True)
class Heartbeat:
    """Content of the file, written by rank zero every few seconds.

    state: `running`, or at the end `ended` or `failed`; a killed run stays `running`. phase: of rank zero, e.g.
    `rl/step/update`. time, progress: seconds since the epoch by rank zero's clock, of this write and of the latest
    begin or end of a phase on any rank. stalls: how often the stacks were dumped since the start.
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
        """Replace the file of a run directory atomically."""
        write_json(RunPaths(directory).heartbeat, asdict(self), patient=False)


def read_heartbeat(directory: Path) -> Heartbeat | None:
    """The heartbeat of a run directory; None when it has none yet or a damaged one."""
    return read_note(RunPaths(Path(directory)).heartbeat, lambda found: Heartbeat(**found), None, "no sign of life")
