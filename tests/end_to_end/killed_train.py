"""`ctpo train ...` that kills itself, with all its processes, at a chosen point: the Nth time it is reached in the run.

After SIGTERM or another signal that it heeds, the run itself decides how it ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.tracking import MetricsWriter


def half_a_line(writer: MetricsWriter, *_: Any) -> None:
    """What a kill in the middle of writing the metrics of a step leaves."""
    writer._file.write('{"step": 1, "actor/en')
    writer._file.flush()


def half_a_file(_transforms: Any, _process: int, bucket: tuple[str, Any, Any], *_: Any) -> None:
    """What a kill in the middle of writing a checkpoint leaves; runs in the process that writes the file."""
    with open(bucket[0], "wb") as file:
        file.write(b"half")


def points() -> dict[str, tuple[Any, str, Callable[..., None] | None]]:
    """Point -> owner, function, and what to do just before the kill, which comes before the function."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from ctpo_megatron.policy import checkpoint_files
    from ctpo_megatron.policy.optimizer import OptimizerSteps
    from ctpo_megatron.rewards import RewardPool
    from ctpo_megatron.rollouts import Replay
    from ctpo_megatron.tracking import MetricsWriter

    return {
        "sample": (Replay, "wait_ready", None),
        "score": (RewardPool, "score", None),
        "update": (OptimizerSteps, "apply", None),
        "write": (FileSystemWriterAsync, "write_preloaded_data", half_a_file),
        "publish": (checkpoint_files, "publish", None),
        "log": (MetricsWriter, "_append", half_a_line),
    }


def arm(number: signal.Signals, point: str, count: int) -> None:
    owner, name, before = points()[point]
    original = getattr(owner, name)
    # A file, not a variable: some points are reached in forked processes.
    reached = os.memfd_create("reached")

    def replacement(*args: Any, **kwargs: Any) -> Any:
        os.write(reached, b".")
        if os.fstat(reached).st_size == count:
            if before is not None:
                before(*args, *kwargs.values())
            os.killpg(0, number)
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def main(command: list[str], kill_at: tuple[str, int] | None, by: str) -> int:
    """`ctpo` with these arguments, in a process group of its own, that gets the signal `by` at (point, count)."""
    from ctpo_megatron import cli

    if kill_at is not None:
        arm(signal.Signals[by], *kill_at)
    return cli.main(command)
