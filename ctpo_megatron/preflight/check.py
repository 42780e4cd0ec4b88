"""What a check is, what it looks at, and how a selection of checks runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from ctpo_megatron.config import Config, ConfigError, Job, Problem, Sources
from ctpo_megatron.models import ModelSpec

C = TypeVar("C")
Check = Callable[[C], Iterable[Problem]]
"""What it found in a context, in the order to show. It never raises: what is wrong is a `Problem`."""


def run_checks(checks: Iterable[Check[C]], context: C) -> list[Problem]:
    """Everything that a selection of checks finds, in its order."""
    return [problem for check in checks for problem in check(context)]


def warnings_of(problems: Iterable[Problem], sources: Sources | None) -> list[Problem]:
    """The problems with the place of their keys. Raises ConfigError with the errors among them."""
    placed = [place(problem, sources) for problem in problems]
    if errors := failed(placed):
        raise ConfigError(errors)
    return placed


def failed(problems: Iterable[Problem]) -> list[Problem]:
    """The problems that training cannot start with."""
    return [problem for problem in problems if problem.failed]


def place(problem: Problem, sources: Sources | None) -> Problem:
    """The problem with the file and line that its key was written at, if the sources know."""
    if problem.where or sources is None or not problem.key:
        return problem
    keys = tuple(problem.key.split("."))
    whole = tuple(key for key in keys if not key.isdigit())  # a list on the command line has no places of its items
    return replace(problem, where=sources.where(keys) if sources.has(keys) or sources.has(whole) else "default")


ONE_RANK = Job(1)


@dataclass(frozen=True)
class RunContext:
    """A configuration, and what it would run on.

    spec: of the model; None: it cannot be read, and checks that need it find nothing. gpu_gib: memory of a GPU; None:
    it is not checked.
    """

    config: Config
    spec: ModelSpec | None = None
    job: Job = ONE_RANK
    cuda: bool = False
    gpu_gib: float | None = None

    def error(self, key: str, message: str, fix: str = "") -> Problem:
        """An error about a key, with its present value."""
        return Problem(key, message, fix, self.value(key))

    def warning(self, key: str, message: str, fix: str = "") -> Problem:
        """A warning about a key, with its present value."""
        return Problem(key, message, fix, self.value(key), severity="warning")

    def value(self, key: str) -> Any:
        """The value of a dotted key."""
        return reduce(getattr, key.split("."), self.config)


class DiskNeeds(NamedTuple):
    """What a run writes into a folder.

    once: bytes without which it fails. whole: bytes in the end; parts: of what; key, fix: what would make it less.
    """

    folder: str
    once: float
    whole: float
    parts: str = ""
    key: str = "run.root"
    fix: str = "another folder"


@dataclass(frozen=True)
class Wanted:
    """What a run needs of each machine.

    weight_bytes: a copy of the weights in the engines' precision. host_bytes: what the model takes for sure in all
    processes on a CPU. expected_bytes: at most, with what the processes hold without a model. ports: (address, port,
    whose) to listen at. servers: (address, port, whose) that have to answer. sandbox: least isolation of a server of
    our own, or `sandbox.NODE`; empty: none is needed. deep: import packages and try
    collectives. shared_memory: where it is.
    """

    weight_bytes: float = 0.0
    disk: tuple[DiskNeeds, ...] = (DiskNeeds(".", 0.0, float(1 << 30)),)
    host_bytes: float = 0.0
    expected_bytes: float = 0.0
    ports: tuple[tuple[str, int, str], ...] = ()
    servers: tuple[tuple[str, int, str], ...] = ()
    sandbox: str = ""
    deep: bool = False
    shared_memory: str = "/dev/shm"


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node, of the names and sizes that the driver gives."""

    name: str
    gib: float
    driver: str


@dataclass(frozen=True)
class MachineContext:
    """This machine, and what a run needs of it.

    gpus: a text names why they are unknown. cuda: the version of CUDA that torch was built for; None: for none, or
    there is no torch.
    """

    wanted: Wanted
    gpus: Sequence[Gpu] | str = ()
    cuda: str | None = None

    @property
    def gpu_count(self) -> int:
        """0 where they are unknown."""
        return 0 if isinstance(self.gpus, str) else len(self.gpus)
