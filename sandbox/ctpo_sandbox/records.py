"""Records shared by server, template, worker and child: limits, levels of isolation, and a child's outcome."""

import math
import struct
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self

from ctpo_sandbox.timeouts import CPU_SLACK_S

Verdict = Literal["success", "timeout", "runtime_error"]
READY = b"ready"
FAILED = b"failed"
STOP = b"stop"
"""To a worker: end the current run."""
CLEANED = b"cleaned"
"""From a worker: the files of the last reported run are removed."""
WALL_FACTOR = 2
"""Wall-time limit of a run, as a multiple of its CPU-time limit: a busy machine is not its fault."""
_NUMBERS = struct.Struct("=4?i3d")
_LEAST_STACK_KB, _MOST_STACK_KB = 128, 8192
MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES = 16 * 1024, 64

LEVELS = {
    "namespaces-root": "landlock, and a process id space, network, mounts and a user id of its own for each slot",
    "namespaces-user": "landlock, and a process id space, network and mounts of its own, in a user namespace",
    "landlock": "files by Landlock, and an allow-list of system calls",
    "none": "resource limits only; snippets have the rights of the server's user",
}
"""Levels of isolation, the strongest first."""

USERS_OF_RUNS = ("namespaces-root", "landlock")
"""Levels at which a server of root gives each slot a user id."""


def _limit(default: float | None, meaning: str, least: int = 0) -> Any:
    """least: below it no program runs, which the self-test could not distinguish from missing isolation."""
    return field(default=default, metadata={"meaning": meaning, "least": least})


@dataclass(frozen=True)
class Limits:
    """Limits of every run: the single declaration of their names, types, defaults and meanings.

    Options of the server, `GET /health`, `GET /metrics` and the keys of a training configuration are derived from it.
    Raises ValueError for a limit that is not a positive number, or below what a program needs.
    """

    run_timeout_s: float = _limit(60.0, "CPU seconds of one execution; it ends after twice as many seconds in any case")
    cpu_s: int | None = _limit(
        None, "CPU seconds that the kernel ends an execution after; null: its time limit rounded up, plus 1"
    )
    memory_mb: int = _limit(512, "address-space limit of one execution in MiB", least=32)
    address_space_mb: int | None = _limit(
        None,
        "MiB that one execution may map; above memory_mb it needs a memory control group; null: memory_mb",
        least=32,
    )
    file_mb: int = _limit(8, "size limit of each file of one execution in MiB, each of its outputs included")
    open_files: int = _limit(256, "file descriptors of one execution", least=4)
    disk_mb: int = _limit(64, "size limit of all files of one execution together in MiB")
    disk_files: int = _limit(4096, "number of files of one execution", least=2)
    threads: int = _limit(128, "threads of one execution")
    output_kb: int = _limit(1000, "thousands of bytes of each output that a reply carries; the rest is cut")
    request_mb: int = _limit(16, "size limit of one request in MiB")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} = {value}: a limit must be a positive number")
        for limit in fields(self):
            value, least = getattr(self, limit.name), limit.metadata["least"]
            if value is not None and value < least:
                raise ValueError(f"{limit.name} = {value}: no program runs with less than {least}")

    @classmethod
    def of(cls, source: object) -> Self:
        """Return the limits in the attributes of `source` with the same names."""
        return cls(**{limit.name: getattr(source, limit.name) for limit in fields(cls)})

    @property
    def address_mb(self) -> int:
        """MiB that an execution may map."""
        return self.address_space_mb or self.memory_mb

    @property
    def thread_stack_kb(self) -> int:
        """KiB of stack of a thread: the stacks of all threads together take half of what an execution may map."""
        return max(_LEAST_STACK_KB, min(_MOST_STACK_KB, self.address_mb * 512 // self.threads))

    @property
    def threads_too_many(self) -> str:
        """Why `threads` cannot all have a stack, and what to do; "" where they can."""
        most = self.address_mb * 512 // _LEAST_STACK_KB
        if self.threads <= most:
            return ""
        name = "memory_mb" if self.address_space_mb is None else "address_space_mb"
        enough = math.ceil(self.threads * _LEAST_STACK_KB / 512)
        return f"{name} = {self.address_mb} has room for the stacks of {most}; lower threads, or set {name} to {enough}"

    @property
    def needs_group(self) -> bool:
        """Whether the address-space limit does not enforce the memory limit."""
        return self.address_mb > self.memory_mb

    def cpu_limit_s(self, run_timeout_s: float) -> int:
        """CPU seconds after which the kernel ends an execution that outlived its time limit."""
        most = math.ceil(run_timeout_s) + CPU_SLACK_S
        return most if self.cpu_s is None else min(self.cpu_s, most)


class ChildOutcome(NamedTuple):
    """How one child ended.

    `exit_code` is -N when signal N killed it. `killed_for`: the limit for which its worker killed it, if any. `fault`:
    why the outcome says nothing about the snippet, if so: the child failed before the first line, or something else on
    the machine killed it. `exhausted`: the fault is a process limit and transient. `refused`: the fault is that the
    child could not drop its privileges. `cleaning`: the worker is still removing the run's files, and will report the
    end.
    """

    timed_out: bool
    exit_code: int
    wall_s: float
    cpu_s: float
    maxrss_mb: float
    killed_for: str = ""
    fault: str | None = None
    exhausted: bool = False
    refused: bool = False
    cleaning: bool = False

    def encode(self) -> bytes:
        """Encode with few objects, so that a worker writes to few pages."""
        timed_out, exit_code, wall_s, cpu_s, maxrss_mb, killed_for, fault, exhausted, refused, cleaning = self
        numbers = _NUMBERS.pack(timed_out, exhausted, refused, cleaning, exit_code, wall_s, cpu_s, maxrss_mb)
        return numbers + f"{killed_for}\n{fault or ''}".encode()

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Inverse of `encode`."""
        timed_out, exhausted, refused, cleaning, exit_code, wall_s, cpu_s, maxrss_mb = _NUMBERS.unpack_from(message)
        killed_for, _, fault = message[_NUMBERS.size :].decode().partition("\n")
        return cls(
            timed_out, exit_code, wall_s, cpu_s, maxrss_mb, killed_for, fault or None, exhausted, refused, cleaning
        )


def option(limit: str) -> str:
    """Return the server's option for the limit of this name."""
    return "--" + limit.replace("_", "-")
