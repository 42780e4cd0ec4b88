"""A cluster file of configs/clusters: where jobs run, their resources, and how they are submitted."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from yaml import YAMLError

from ctpo_launchers import LaunchError
from ctpo_launchers.timeouts import CHECK_SIGNAL_S
from ctpo_megatron.config import Problem

CLOCK = r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$"
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_WORD = re.compile(r"[A-Za-z0-9_./+@%:=,~][A-Za-z0-9_./+@%:=,#~-]*")


def _line(text: Any) -> Any:
    """Every value is a part of a line of the batch script, where a line end would begin another."""
    if isinstance(text, str) and not text.isprintable():
        raise ValueError(f"{text!r} has line ends or control characters, which would be lines of the batch script")
    return text


def is_word(text: str) -> bool:
    """Return whether a shell takes it as it is: NeMo Run does not quote all that it writes into a batch script."""
    return bool(_WORD.fullmatch(text))


def _word(text: str) -> str:
    if not is_word(text):
        raise ValueError(
            f"{text!r} may hold only letters, digits and {'./+@%:=,#~_-'}, as it stands in a shell command"
        )
    return text


def _interpreter(text: str) -> str:
    if "python" not in Path(_word(text)).name:
        raise ValueError(f"{text!r} is no Python: give the interpreter, such as /shared/ctpo/.venv/bin/python")
    return text


OneLine = Annotated[str, AfterValidator(_line)]
Word = Annotated[str, AfterValidator(_word)]
Option = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]


class Cluster(BaseModel):
    """One cluster file. Keys with Slurm's names have Slurm's meaning; null uses the cluster's default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    executor: Literal["local", "slurm"] = Field(description="who starts the node programs")
    job_dir: Word = Field(
        description="folder of the jobs: code, scripts, output; on a file system that all nodes share"
    )
    account: Word | None = Field(default=None, description="Slurm account that pays; NeMo Run wants one")
    partition: Word | None = Field(default=None, description="Slurm partition")
    qos: Word | None = Field(default=None, description="Slurm quality of service")
    time: str = Field(default="04:00:00", pattern=CLOCK, description="time limit of one job, `hours:minutes:seconds`")
    gpus_per_node: PositiveInt | None = Field(default=None, description="GPUs of a node, trainer and engines together")
    gpu_gib: PositiveFloat = Field(default=80.0, description="memory of a GPU in GiB, for the checks before a job")
    cpus_per_task: PositiveInt | None = Field(default=None, description="CPU cores of a node program and its children")
    mem: Word | None = Field(default=None, description="memory of a node, e.g. 0 for all of it")
    exclusive: bool | None = Field(default=None, description="no other job on these nodes")
    sbatch: dict[Option, Annotated[str | int | bool, AfterValidator(_line)]] = Field(
        default={}, description="further options of sbatch, without dashes"
    )
    python: Annotated[str, AfterValidator(_interpreter)] = Field(
        default="python", description="interpreter on the nodes: of the container, or an absolute path"
    )
    container_image: Word | None = Field(default=None, description="image for Pyxis/Enroot; null: the nodes' own files")
    container_mounts: tuple[Word, ...] = Field(default=(), description="`host:container`; job_dir is mounted anyway")
    container_env: tuple[Variable, ...] = Field(
        default=(), description="variables that keep the job's value in the container; secrets by name only"
    )
    setup: tuple[str, ...] = Field(default=(), description="lines of the batch script before srun: shell commands")
    env: dict[Variable, OneLine] = Field(
        default={}, description="environment of the node programs, in clear in the script"
    )
    interface: Word | None = Field(
        default=None, description="network of gloo, NCCL and Ray; null: the route to the head"
    )
    signal_s: PositiveInt = Field(
        default=180, description="seconds of notice: SIGTERM to all tasks before the time limit"
    )
    retries: NonNegativeInt = Field(
        default=3, description="restarts after failures; after preemption there is no limit"
    )
    start_timeout_s: PositiveFloat = Field(
        default=600.0, allow_inf_nan=False, description="deadline for all nodes to be ready"
    )

    @model_validator(mode="after")
    def _complete(self) -> Cluster:
        if self.executor == "slurm" and self.account is None:
            raise ValueError("account: required for Slurm; NeMo Run writes it into the script")
        if self.executor == "slurm" and self.container_image is None and not Path(self.python).is_absolute():
            raise ValueError(f"python: {self.python!r} must be an absolute path where there is no container_image")
        if self.executor == "slurm" and _seconds(self.time) <= self.signal_s:
            raise ValueError(
                f"signal_s: SIGTERM {self.signal_s} s before the end of a job of {self.time} would come as it starts: "
                "lower it, or raise time"
            )
        return self


_CHECK_TIME = "00:15:00"


def for_check(cluster: Cluster) -> Cluster:
    """Return the same cluster for a job that looks at it: short, so that it starts soon, and not tried again."""
    update = {"time": _CHECK_TIME, "signal_s": CHECK_SIGNAL_S, "retries": 0}
    return cluster.model_copy(update=update)


def _seconds(clock: str) -> int:
    days, _, rest = clock.rpartition("-")
    hours, minutes, seconds = map(int, rest.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def load_cluster(path: Path) -> Cluster:
    """Read and check a cluster file. Raises LaunchError with all problems at once."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise LaunchError(f"{path}: {str(error).strip()}") from error
    if not isinstance(values, dict):
        raise LaunchError(f"{path}: must be a mapping of keys, e.g. `executor: slurm`")
    try:
        return Cluster.model_validate(values, strict=False)
    except ValidationError as error:
        lines = [f"  {_problem(detail)}" for detail in error.errors()]
        raise LaunchError("\n".join([f"{path} has {len(lines)} problem(s):", *lines])) from error


def _problem(detail: ErrorDetails) -> Problem:
    key, kind = ".".join(map(str, detail["loc"])), detail["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, Cluster.model_fields, n=1)
        known = ", ".join(Cluster.model_fields)
        return Problem(key, "unknown key", f"did you mean {near[0]}?" if near else f"known are {known}")
    if kind == "missing":
        return Problem(key, "required, but not given", f"add it: {Cluster.model_fields[key].description}")
    if kind == "value_error":
        return Problem(key, str(detail["ctx"]["error"]))
    hint = " (quote it: YAML reads 12:30:00 as a number)" if key == "time" else ""
    # Not as the value of the problem: `inf` is shown as it was typed, and not as JSON has it.
    return Problem(f"{key} = {detail['input']!r}", f"{str(detail['msg']).replace('Input should be', 'must be')}{hint}")
