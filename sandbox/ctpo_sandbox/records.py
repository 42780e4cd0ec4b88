"""What server, worker and child tell each other: the limits of a run and how a child ended."""

import json
from dataclasses import asdict, dataclass
from typing import Self

READY = b"ready"
MAX_MESSAGE_BYTES = 16 * 1024


@dataclass(frozen=True)
class Limits:
    """Limits of every child.

    `memory_mb` bounds its address space, `file_mb` each file it writes (both outputs included), `open_files` its
    descriptors.
    """

    memory_mb: int = 512
    file_mb: int = 8
    open_files: int = 256


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
