"""`ctpo train ...` that kills itself, with all its processes, at a chosen point.

python killed_train.py POINT N CONFIG [a.b=c ...]: at the Nth time that POINT is reached, over the whole run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.observe import MetricsWriter


def kill_job() -> None:
    os.killpg(0, signal.SIGKILL)


def half_a_line(writer: MetricsWriter, *_: Any) -> None:
    """What a kill in the middle of writing the metrics of a step leaves."""
    writer._file.write('{"step": 1, "actor/en')
    writer._file.flush()


def half_a_file(_transforms: Any, _process: int, bucket: tuple[str, Any, Any], *_: Any) -> None:
    """What a kill in the middle of writing a checkpoint leaves; runs in the process that writes the file."""
    with open(bucket[0], "wb") as file:
        file.write(b"half")


def points() -> dict[str, tuple[Any, str, Callable[..., None] | None]]:
    """Point -> owner, function, and what to do just before the kill. The kill comes instead of the function."""
    # Imported here: processes that the job spawns import this file, and need none of it.
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from ctpo_megatron.observe import MetricsWriter
    from ctpo_megatron.policy import Policy, checkpoint_files
    from ctpo_megatron.rewards import RewardPool

    return {
        "score": (RewardPool, "score", None),
        "update": (Policy, "update", None),
        "write": (FileSystemWriterAsync, "write_preloaded_data", half_a_file),
        "publish": (checkpoint_files, "publish", None),
        "log": (MetricsWriter, "_append", half_a_line),
    }


def arm(point: str, count: int) -> None:
    owner, name, before = points()[point]
    original = getattr(owner, name)
    # A file, not a variable: some points are reached in forked processes.
    reached = os.memfd_create("reached")

    def replacement(*args: Any, **kwargs: Any) -> Any:
        os.write(reached, b".")
        if os.fstat(reached).st_size < count:
            return original(*args, **kwargs)
        if before is not None:
            before(*args, *kwargs.values())
        kill_job()

    setattr(owner, name, replacement)


if __name__ == "__main__":
    from ctpo_megatron.cli import main

    arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(["train", *sys.argv[3:]]))
