"""Ranks of a trainer, one of which is killed, frozen, slow or wrong; each says how it has ended.

The trainer is a collective of all ranks, before which a rank may meet its fate. All else is what a run has.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ctpo_megatron.base.stop import StopSignal
from ctpo_megatron.policy import destroy_distributed, init_distributed
from ctpo_megatron.run import TrainerGroup
from ctpo_megatron.tracking import Phases
from tests.tracking.synthetic_run import make_config

TIMEOUT_S = 6.0
"""`policy.timeout_minutes` of these ranks."""
FROZEN_S = 2.0
STEPS = 3
"""Commands that rank zero gives."""


def freeze(seconds: float | None = None) -> None:
    """Stop this process, for good or until another one continues it."""
    pid = os.getpid()
    if seconds is not None and os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def oversleep() -> None:
    time.sleep(20 * TIMEOUT_S)


def refuse() -> None:
    raise ValueError("runs/x exists\nand more")


Fate = tuple[int, str, Callable[[], None]]
"""A rank; `command`: it happens there in the second command, `alone`: between the first and the second; what."""
FATES: dict[str, Fate] = {
    "nothing": (0, "alone", lambda: None),
    "rank zero acts for longer than a collective may take": (0, "alone", lambda: time.sleep(1.5 * TIMEOUT_S)),
    "killed while rank zero acts": (1, "alone", kill),
    "killed in a command": (1, "command", kill),
    "frozen while rank zero acts": (1, "alone", freeze),
    "frozen in a command": (1, "command", freeze),
    "frozen for a moment": (1, "command", lambda: freeze(FROZEN_S)),
    "asleep in a command": (1, "command", oversleep),
    "wrong in a command": (1, "command", refuse),
    "rank zero is killed": (0, "alone", kill),
    "rank zero is wrong": (0, "alone", refuse),
    "rank zero is wrong in a command": (0, "command", refuse),
    "rank zero is frozen in a command": (0, "command", freeze),
}


class Working:
    """The trainer of a rank: the sum over all ranks, of ones."""

    def __init__(self, rank: int, fate: Fate) -> None:
        self.rank, self.fate, self.sums = rank, fate, list[float]()

    def compile_kernels(self, _objective: object) -> None:
        rank, where, what = self.fate
        if (self.rank, where, len(self.sums)) == (rank, "command", 1):
            what()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        self.sums.append(float(ones))


def main(root: Path, how: str) -> int:
    """Give the commands or serve, then write down how it ended."""
    began, fate = time.monotonic(), FATES[how]
    config = make_config(root, model={"path": str(root)}, policy={"timeout_minutes": TIMEOUT_S / 60})
    told, sums = "", list[float]()
    try:
        with ExitStack() as stack:
            layout = init_distributed(config.policy, seed=0)
            stack.callback(destroy_distributed)
            group = stack.enter_context(TrainerGroup(config, layout, StopSignal(grace_s=60)))
            trainer: Any = Working(layout.rank, fate)
            group.trainer, sums = trainer, trainer.sums
            if layout.is_rank_zero:
                _command(group, root, fate)
            else:
                _meet_fate_alone(layout.rank, fate)
                group.serve()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    found = {"told": told, "sums": sums, "seconds": time.monotonic() - began}
    (root / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))
    return 0


def _command(group: TrainerGroup, root: Path, fate: Fate) -> None:
    group.dump_stacks(root, phases=Phases())
    for step in range(STEPS):
        if step == 1:
            time.sleep(FROZEN_S)  # so that the others' fate is before the next command
            if fate[:2] == (0, "alone"):
                fate[2]()
        group.compile_kernels()


def _meet_fate_alone(rank: int, fate: Fate) -> None:
    """In a second, while this rank serves."""
    if fate[:2] == (rank, "alone"):
        signal.signal(signal.SIGALRM, lambda *_: None)
        pid, what = os.getpid(), fate[2]
        if os.fork() == 0:
            time.sleep(FROZEN_S / 2)
            os.kill(pid, signal.SIGKILL if what is kill else signal.SIGSTOP)
            os._exit(0)
