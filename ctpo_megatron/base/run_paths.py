"""Names of everything in a run directory, spelled in no other module. docs/reference/run_directory.md lists them."""

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
RENDERING = "rendering.json"
"""Also of `ctpo eval`."""
SFT_CHECKPOINTS = "sft"
"""Folder of the supervised stage's checkpoints, within the folder of RL checkpoints."""
TUNING, TUNING_RECORD = "tuning", "tuning.json"
"""In the folder of a sweep: its runs that tune, and what they picked."""
MARKER = "COMPLETE.json"
"""In a checkpoint that was written whole."""
AHEAD, AHEAD_JSON = "ahead.parquet", "ahead.json.gz"
"""In a checkpoint of a run that samples ahead: the groups that were sampled and not trained on. Earlier versions wrote
the second."""

_DISCARDED = "discarded_"
_STEP = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    """Return the stem of what is written once a step."""
    return f"step_{step:06d}"


def step_in(name: str) -> int | None:
    """Return the step that `step_name` made this of; None: the name has another form, e.g. of a discarded
    checkpoint.
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def discarded(path: Path) -> Path:
    """Return the name that a resumed run gives to what was written after the step it continues from."""
    return path.with_name(f"{_DISCARDED}{path.name}")


def is_discarded(path: Path) -> bool:
    """Return whether `discarded` gave this name."""
    return path.name.startswith(_DISCARDED)


class _Entry:
    """Attribute of a class of paths: what has this path below its `root`."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, paths: LogPaths | RunPaths, _kind: type) -> Path:
        return paths.root.joinpath(*self.parts)


@dataclass(frozen=True, slots=True)
class LogPaths:
    """A folder of logs: of a run, of `ctpo eval`, or of one node of a job."""

    root: Path

    train = _Entry("train.log")
    """What the terminal shows, and the trainer's log."""
    sandbox = _Entry("sandbox.log")
    """Output of the sandbox server."""
    rewards = _Entry("rewards.log")
    """What reward functions print."""

    def engine(self, index: int) -> Path:
        """Output of engine number `index`."""
        return self.root / f"rollout_engine_{index}.log"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where a run keeps what it writes. Nothing is created or read here.

    root: the run directory.
    """

    root: Path

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the entries of a run directory that a run writes, besides the exported model."""
        return frozenset([LOGS, *(entry.parts[0] for entry in vars(cls).values() if isinstance(entry, _Entry))])

    @property
    def nodes(self) -> Path:
        """Where the nodes of a job write. It is next to the run directory, which a new run may delete."""
        return Path(f"{self.root}.nodes")

    @property
    def checked_nodes(self) -> Path:
        """The same for `ctpo launch --check`: the run itself may have a job at the same time."""
        return self.nodes / "check"

    @property
    def logs(self) -> LogPaths:
        """Output of the trainer, engines and sandbox."""
        return LogPaths(self.root / LOGS)

    config = _Entry("config.yaml")
    """The resolved configuration. A directory without it is no run directory."""
    previous_config = _Entry("config.previous.yaml")
    """The configuration before the latest resume that changed it."""
    environment = _Entry("environment.json")
    """Commit, command, host, devices and versions of the latest start."""
    owner = _Entry("owner.lock")
    """The lock of the process that writes into the directory."""
    data = _Entry("data.json")
    """Rows of the training files, and which were left out."""
    rendering = _Entry(RENDERING)
    """Digests of the rows and of what they were rendered with when the run was begun."""
    extensions = _Entry("extensions")
    """Copies of the source files of users' parts."""
    previous_extensions = _Entry("extensions.previous")
    """The copies before the latest resume with changed code."""
    metrics = _Entry(METRICS)
    """One object an RL step."""
    discarded_metrics = _Entry(f"{_DISCARDED}{METRICS}")
    """Lines of RL steps that a resume took out."""
    sft_metrics = _Entry(SFT_METRICS)
    """One object a step of the supervised stage."""
    discarded_sft_metrics = _Entry(f"{_DISCARDED}{SFT_METRICS}")
    """Lines of supervised steps that a resume took out."""
    positions = _Entry(POSITIONS)
    """Statistics by position, one object an RL step or more."""
    discarded_positions = _Entry(f"{_DISCARDED}{POSITIONS}")
    """Its lines that a resume took out."""
    stages = _Entry("stages.json")
    """Seconds of each stage."""
    heartbeat = _Entry("heartbeat.json")
    """Whether the run lives, and where it is."""
    stalls = _Entry("stalls")
    """Python stacks of ranks that stood still."""
    trajectories = _Entry(TRAJECTORIES)
    """Dumps of training steps."""
    evaluation = _Entry(EVALUATION)
    """Dumps of evaluations."""
    checkpoints = _Entry("checkpoints")
    """Checkpoints of RL steps."""
    sft_checkpoints = _Entry("checkpoints", SFT_CHECKPOINTS)
    """Checkpoints of the supervised stage, until RL has one."""
    sft_model = _Entry("sft_model")
    """The model after the supervised stage, in Hugging Face format."""
    profile = _Entry("profile")
    """Folder of the traces of `run.profile_steps`; engines write theirs into it, too."""
    tensorboard = _Entry("tensorboard")
    """TensorBoard's event files."""
    trackers = _Entry("trackers")
    """By which each tracker finds the run again when it is resumed."""
    wandb = _Entry("wandb")
    """What the wandb library itself writes into the run directory."""
    report = _Entry(REPORT)
    """The report."""
    trajectories_page = _Entry("trajectories.html")
    """The page of trajectories that `ctpo report` chose last."""
    figures = _Entry("figures")
    """The figures of the report."""

    def stacks(self, rank: int) -> Path:
        """Python stacks of a rank."""
        return self.stalls / f"rank_{rank}.txt"

    def dump(self, step: int, folder: str = TRAJECTORIES) -> Path:
        """Trajectories of a step. folder: `TRAJECTORIES` or `EVALUATION`."""
        return self.root / folder / f"{step_name(step)}.parquet"

    def trace(self, step: int, rank: int) -> Path:
        """Return the trace of a step by a rank of the trainer."""
        return self.profile / f"{step_name(step)}_rank_{rank}.json.gz"

    def tracker(self, name: str) -> Path:
        """Return the identity of a tracker, whose name may be an import path."""
        return self.trackers / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"

    def checkpoint_export(self, checkpoint: Path) -> Path:
        """Return where `ctpo export` writes the model of a checkpoint."""
        return self.root / f"model-{checkpoint.name}"

    def checkpoint_exports(self) -> Iterator[Path]:
        """Yield the models that `ctpo export` has written."""
        return self.root.glob("model-step_*")
