"""What server, template, worker and child tell each other: limits, levels of isolation, and how a child ended."""

import json
from dataclasses import asdict, dataclass
from typing import Self

READY = b"ready"
FAILED = b"failed"
MAX_MESSAGE_BYTES = 16 * 1024

LEVELS = {
    "namespaces-root": "A: own process ids, network, mounts and user id per slot, beside what C and D do",
    "namespaces-user": "B: own process ids, network and mounts in a user namespace, beside what C and D do",
    "landlock": "C: files by Landlock, beside what D does",
    "seccomp": "D: system calls filtered; world-readable files can be read",
    "none": "E: resource limits only; snippets have the rights of the server's user",
}
"""Levels of isolation, the strongest first."""


@dataclass(frozen=True)
class Limits:
    """Limits of every run.

    `memory_mb` bounds its address space, `file_mb` each file it writes (both outputs included), `open_files` its
    descriptors. Where the level allows it, `disk_mb` bounds its files together, `disk_files` their number, and
    `threads` its threads.
    """

    memory_mb: int = 512
    file_mb: int = 8
    open_files: int = 256
    disk_mb: int = 64
    disk_files: int = 4096
    threads: int = 128


@dataclass(frozen=True)
class Outcome:
    """How one child ended.

    `exit_code` is -N when signal N killed it. `setup_error` is set when the child failed before the first line of the
    snippet; nothing else in the record means anything then.
    """

    timed_out: bool
    exit_code: int
    wall_s: float
    cpu_s: float
    maxrss_mb: float
    setup_error: str | None = None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Self:
        return cls(**json.loads(message))
