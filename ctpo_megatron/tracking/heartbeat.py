"""The heartbeat file of a run: from its age and content whoever looks from outside tells whether the run lives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.run_paths import RunPaths


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
        write_json(RunPaths(directory).heartbeat, asdict(self))


def read_heartbeat(directory: Path) -> Heartbeat | None:
    """The heartbeat of a run directory; None when it has none yet or a damaged one."""
    return read_note(RunPaths(Path(directory)).heartbeat, lambda found: Heartbeat(**found), None, "no sign of life")
