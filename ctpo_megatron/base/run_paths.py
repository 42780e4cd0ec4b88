"""The names of everything in a run directory. No other module spells them (docs/architecture.md lists them)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

METRICS, SFT_METRICS, POSITIONS = "metrics.jsonl", "sft.jsonl", "positions.jsonl"
TRAJECTORIES, EVALUATION = "trajectories", "evaluation"
"""Folders of dumps: of training, and of evaluations."""
EXPORT = "model"
"""The default of `export.directory`."""
REPORT = "report.html"
"""Also the page of `ctpo eval`."""
LOGS = "logs"
"""Also of `ctpo eval`."""
ROWS = "rendered"
"""Also of `ctpo eval`."""
SFT_CHECKPOINTS = "sft"
"""Folder of the supervised stage's checkpoints, within the folder of RL checkpoints."""
MARKER = "COMPLETE.json"
"""In a checkpoint that was written whole."""
AHEAD, AHEAD_JSON = "ahead.parquet", "ahead.json.gz"
"""In a checkpoint of a run that samples ahead: the groups that were sampled and not trained on."""

_DISCARDED = "discarded_"
_STEP = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    """The stem of what is written once a step."""
    return f"step_{step:06d}"


def step_in(name: str) -> int | None:
    """The step that `step_name` made this of; None: the name has another form, e.g. of a discarded checkpoint."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def discarded(path: Path) -> Path:
    """The name that a resumed run gives to what was written after the step it continues from."""
    return path.with_name(f"{_DISCARDED}{path.name}")


def is_discarded(path: Path) -> bool:
    """Whether `discarded` gave this name."""
    return path.name.startswith(_DISCARDED)


@dataclass(frozen=True, slots=True)
class LogPaths:
    """A folder of logs: of a run, of `ctpo eval`, or of one node of a job."""

    folder: Path

    @property
    def train(self) -> Path:
        """What the terminal shows, and the trainer's log."""
        return self.folder / "train.log"

    @property
    def occupancy(self) -> Path:
        """Trajectories in flight on each engine, over time."""
        return self.folder / "engine_occupancy.csv"

    @property
    def sandbox(self) -> Path:
        """Output of the sandbox server."""
        return self.folder / "sandbox.log"

    @property
    def rewards(self) -> Path:
        """What reward functions print."""
        return self.folder / "rewards.log"

    def engine(self, index: int) -> Path:
        """Output of engine number `index`."""
        return self.folder / f"rollout_engine_{index}.log"

    def tracker(self, name: str) -> Path:
        """Output of the process of a tracker."""
        return self.folder / f"tracker_{_plain(name)}.log"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where a run keeps what it writes. Nothing is created or read here.

    root: the run directory.
    """

    root: Path

    @classmethod
    def names(cls) -> frozenset[str]:
        """The entries of a run directory that a run writes, besides the exported model."""
        root = Path("run")
        properties = [name for name, member in vars(cls).items() if isinstance(member, property)]
        paths = [_path(getattr(cls(root), name)) for name in properties]
        return frozenset(path.relative_to(root).parts[0] for path in paths if path.is_relative_to(root))

    @property
    def nodes(self) -> Path:
        """Where the nodes of a job write. It is next to the run directory, which a new run may delete."""
        return Path(f"{self.root}.nodes")

    @property
    def checked_nodes(self) -> Path:
        """The same for `ctpo launch --check`: the run itself may have a job at the same time."""
        return self.nodes / "check"

    @property
    def config(self) -> Path:
        """The resolved configuration. A directory without it is no run directory."""
        return self.root / "config.yaml"

    @property
    def previous_config(self) -> Path:
        """The configuration before the latest resume that changed it."""
        return self.root / "config.previous.yaml"

    @property
    def environment(self) -> Path:
        """Commit, command, host, devices and versions of the latest start."""
        return self.root / "environment.json"

    @property
    def owner(self) -> Path:
        """The lock of the process that writes into the directory."""
        return self.root / "owner.lock"

    @property
    def data(self) -> Path:
        """Rows of the training files, and which were left out."""
        return self.root / "data.json"

    @property
    def rows(self) -> Path:
        """Folder of the rendered rows that the run was begun with."""
        return self.root / ROWS

    @property
    def extensions(self) -> Path:
        """Copies of the source files of users' parts."""
        return self.root / "extensions"

    @property
    def previous_extensions(self) -> Path:
        """The copies before the latest change that `run.accept_changed_code` allowed."""
        return self.root / "extensions.previous"

    @property
    def extensions_record(self) -> Path:
        """Digests of the copies, and which changes were accepted."""
        return self.root / "extensions.json"

    @property
    def metrics(self) -> Path:
        """One object an RL step."""
        return self.root / METRICS

    @property
    def discarded_metrics(self) -> Path:
        """Lines of RL steps that a resume took out."""
        return discarded(self.metrics)

    @property
    def sft_metrics(self) -> Path:
        """One object a step of the supervised stage."""
        return self.root / SFT_METRICS

    @property
    def discarded_sft_metrics(self) -> Path:
        """Lines of supervised steps that a resume took out."""
        return discarded(self.sft_metrics)

    @property
    def positions(self) -> Path:
        """Statistics by position, one object an RL step or more."""
        return self.root / POSITIONS

    @property
    def discarded_positions(self) -> Path:
        """Its lines that a resume took out."""
        return discarded(self.positions)

    @property
    def stages(self) -> Path:
        """Seconds of each stage."""
        return self.root / "stages.json"

    @property
    def heartbeat(self) -> Path:
        """Whether the run lives, and where it is."""
        return self.root / "heartbeat.json"

    @property
    def stalls(self) -> Path:
        """Python stacks of a run without progress."""
        return self.root / "stalls"

    @property
    def stall_report(self) -> Path:
        """What was reported of each stall."""
        return self.stalls / "report.txt"

    @property
    def trajectories(self) -> Path:
        """Dumps of training steps."""
        return self.root / TRAJECTORIES

    @property
    def evaluation(self) -> Path:
        """Dumps of evaluations."""
        return self.root / EVALUATION

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of RL steps."""
        return self.root / "checkpoints"

    @property
    def sft_checkpoints(self) -> Path:
        """Checkpoints of the supervised stage, until RL has one."""
        return self.checkpoints / SFT_CHECKPOINTS

    @property
    def sft_model(self) -> Path:
        """The model after the supervised stage, in Hugging Face format."""
        return self.root / "sft_model"

    @property
    def sft_record(self) -> Path:
        """What that model was taught with; there once it is whole."""
        return self.root / "sft_model.json"

    @property
    def logs(self) -> LogPaths:
        """Output of the trainer, engines, sandbox and trackers."""
        return LogPaths(self.root / LOGS)

    @property
    def profile(self) -> Path:
        """Folder of the traces of `run.profile_steps`; engines write theirs into it, too."""
        return self.root / "profile"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def trackers(self) -> Path:
        """By which each tracker finds the run again when it is resumed."""
        return self.root / "trackers"

    @property
    def wandb(self) -> Path:
        """What the wandb library itself writes into the run directory."""
        return self.root / "wandb"

    @property
    def report(self) -> Path:
        """The report."""
        return self.root / REPORT

    @property
    def figures(self) -> Path:
        """The figures of the report."""
        return self.root / "figures"

    def rows_of(self, kind: str) -> Path:
        """Rendered rows of `train`, `eval` or `sft`."""
        return self.rows / f"{kind}.parquet"

    def stacks(self, rank: int) -> Path:
        """Python stacks of a rank."""
        return self.stalls / f"rank_{rank}.txt"

    def dump(self, step: int, form: str, folder: str = TRAJECTORIES) -> Path:
        """Trajectories of a step. form: `jsonl` or `parquet`; folder: `TRAJECTORIES` or `EVALUATION`."""
        return self.root / folder / f"{step_name(step)}.{form}"

    def trace(self, step: int, rank: int) -> Path:
        """The trace of a step by a rank of the trainer."""
        return self.profile / f"{step_name(step)}_rank_{rank}.json.gz"

    def tracker(self, name: str) -> Path:
        """The identity of a tracker."""
        return self.trackers / f"{_plain(name)}.json"

    def checkpoint_export(self, checkpoint: Path) -> Path:
        """Where `ctpo export` writes the model of a checkpoint."""
        return self.root / f"model-{checkpoint.name}"

    def checkpoint_exports(self) -> Iterator[Path]:
        """The models that `ctpo export` has written."""
        return self.root.glob("model-step_*")


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """Where a sweep keeps what it writes, besides its runs. root: the folder that the run directories are in."""

    root: Path

    @property
    def record(self) -> Path:
        """The grid, the runs and their states."""
        return self.root / "sweep.json"

    @property
    def owner(self) -> Path:
        """The lock of the process that runs the sweep."""
        return RunPaths(self.root).owner

    @property
    def comparison(self) -> Path:
        """The page that compares the runs."""
        return self.root / "comparison.html"


def _path(entry: Path | LogPaths) -> Path:
    return entry.folder if isinstance(entry, LogPaths) else entry


def _plain(name: str) -> str:
    """The name of a tracker, which may be an import path, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
