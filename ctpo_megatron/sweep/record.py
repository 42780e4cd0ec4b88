"""What a sweep records of its runs (`sweep.json`), and whether the runs that are there belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ctpo_megatron import __version__
from ctpo_megatron.base.files import DamagedFileError, read_mapping, write_json
from ctpo_megatron.base.run_paths import RunPaths, SweepPaths
from ctpo_megatron.config import Problem, flattened, has_sft_record, stored_settings
from ctpo_megatron.run import is_finished
from ctpo_megatron.sweep.plan import PlannedRun, SftMode, Sweep

StateName = Literal["waiting", "running", "finished", "failed", "stopped"]
_MAY_CHANGE = (
    "run.",
    "tracking.",
    "checkpoint.",
    "export.",
    "cluster.",
    "extensions.path",
    "data.rerender",
    "sft.export",
)
"""Keys that change no result, and `run.steps`, which continues runs."""
_OF_SFT = ("sft.", "model.", "prepare.", "policy.dtype", "data.system_prompt", "data.tool_in_prompt", "rollout.tool")
"""Keys that a run which does SFT for others depends on; what they sweep over may be changed."""


@dataclass
class RunState:
    """state: of the latest start. status: exit status of that; None: it has not ended, or there was none."""

    name: str
    values: dict[str, str]
    sft: str | None = None
    state: StateName = "waiting"
    status: int | None = None


@dataclass
class SweepRecord:
    """The runs of a sweep, for people and for the comparison. sft: how SFT is shared; None: it is not."""

    config: str
    overrides: list[str]
    grid: dict[str, list[str]]
    sft: SftMode | None
    sft_runs: list[RunState]
    runs: list[RunState]
    version: str = field(default=__version__)

    @classmethod
    def of(cls, sweep: Sweep, config: str) -> SweepRecord:
        """Of a sweep that starts, or continues. config: the file it is made from."""
        grid = {axis.key: list(axis.values) for axis in sweep.grid.axes}
        sft_runs, runs = ([_state(run) for run in part] for part in (sweep.sfts.values(), sweep.runs))
        return cls(config, list(sweep.grid.overrides), grid, sweep.mode, sft_runs, runs)

    def state_of(self, name: str) -> RunState:
        """Of a run, or of an SFT."""
        return next(each for each in [*self.sft_runs, *self.runs] if each.name == name)

    def write(self, directory: Path) -> None:
        """Write `sweep.json`."""
        write_json(SweepPaths(directory).record, asdict(self), durable=True)


def is_done(run: PlannedRun) -> bool:
    """Whether nothing is left to do of a run; of an SFT, whether its model is there."""
    finished = is_finished(run.config.run)
    return finished and (run.config.run.steps > 0 or run.config.own_sft is None or has_sft_record(run.directory))


def _state(run: PlannedRun) -> RunState:
    return RunState(run.name, run.values, run.sft, "finished" if is_done(run) else "waiting")


def differing(run: PlannedRun, source: Path | None, *, alone: bool) -> Iterator[Problem]:
    """Keys by which a run that is there was begun with other values: its results would not be this sweep's.

    source: the run whose SFT model it starts from. alone: it does SFT alone.
    """
    path = RunPaths(run.directory).config
    if not path.is_file():
        return
    try:
        was = dict(flattened(read_mapping(path)))
    except DamagedFileError as error:
        yield Problem("run.name", str(error), f"delete {run.directory}, which is then run again", run.name)
        return
    tree = stored_settings(run.config)
    if source is not None:
        tree["sft"]["from"] = str(source)
    now = dict(flattened(tree))
    for key in sorted(was.keys() | now.keys()):
        fixed = key == "run.seed" or not key.startswith(_MAY_CHANGE)
        if alone:
            fixed = key == "run.seed" or (key.startswith(_OF_SFT) and key != "sft.export")
        if fixed and was.get(key) != now.get(key):
            message = f"{run.directory} was begun with {was.get(key)!r}"
            yield Problem(key, message, "choose another run.name for this sweep, or set it back", now.get(key))
