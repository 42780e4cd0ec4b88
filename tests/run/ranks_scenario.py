"""Rank zero calls, the others serve; what rank zero asks for, and how the ranks end, is the scenario's."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ctpo_megatron.base.stop import StopSignal
from ctpo_megatron.policy import RankZeroError, destroy_distributed, init_distributed
from ctpo_megatron.run import TrainerGroup
from ctpo_megatron.tracking import Phases
from tests.tracking.synthetic_run import make_config

ON_GPUS: dict[str, Any] = {
    "policy": {"dtype": "bfloat16", "use_distributed_optimizer": True, "mini_batch_prompts": 16},
    "placement": {"trainer_gpus": 2, "engine_gpus": 2},
    "rollout": {"engine": {"max_model_len": 9216}},
}


LATER_S = 0.5


class Failed(Exception):
    """Rank zero has failed between two calls."""


@dataclass
class SavingTrainer:
    """A trainer without a model, which records when a checkpoint is finished.

    signalled: seconds after which it then gets SIGTERM.
    """

    group: TrainerGroup
    seen: list[Any]
    signalled: float | None = None

    def finish_save(self, *, wait: bool = True) -> None:
        with self.group.phases.phase("save"):
            pass
        self.seen.append(wait)
        if wait and self.signalled is not None:
            pid = os.getpid()
            if self.signalled == 0 or os.fork() == 0:
                time.sleep(self.signalled)
                os.kill(pid, signal.SIGTERM)
                if os.getpid() != pid:
                    os._exit(0)


def main(root: Path, how: str) -> dict[str, Any]:
    """What this rank has seen, and how it ended."""
    config = make_config(root, model={"path": str(root)}, **(ON_GPUS if how == "settles" else {}))
    stop = StopSignal(grace_s=60)
    layout = init_distributed(config.policy, seed=0)
    group = TrainerGroup(config, layout, stop)
    seen: list[Any] = []
    patch("ctpo_megatron.run.ranks.gpu_bytes", lambda: (48 - 24 * layout.rank) << 30).start()  # of pretended GPUs
    trainer: Any = SavingTrainer(group, seen)
    group.trainer = trainer
    status: Any = None
    with suppress(Failed):
        try:
            with group:
                status = _of_rank_zero(group, root, how) if layout.is_rank_zero else _signalled(group, how)
        except RankZeroError as error:
            status = str(error)
    if how == "settles":
        seen.append(group._config.policy.chosen)
    destroy_distributed()
    return {"status": status, "seen": seen, "stopped": stop.is_set()}


def _of_rank_zero(group: TrainerGroup, root: Path, how: str) -> int:
    phases = Phases()
    if how == "settles":
        group.settle(None)
        return 7
    group.dump_stacks(root, phases=phases)
    with phases.stage("rl"):
        if how == "traced":
            group.begin_trace(2)
        group.finish_save(False)
        if how == "traced":
            group.end_trace(2, root)
        with group.stop_deferred():
            group.finish_save()
            if how == "fails":
                raise Failed("no more prompts")
            # The other rank's signal, which it got after that call.
            while how == "stops" and not group.stop_agreed():
                pass
            if how == "stops waiting":  # for a command, when the signal comes
                time.sleep(3 * LATER_S)
                assert group.stop_agreed()
    return 7


def _signalled(group: TrainerGroup, how: str) -> int:
    """Serve; with `stops` this rank alone gets SIGTERM once it may save, or when it waits for rank zero."""
    trainer: Any = group.trainer
    trainer.signalled = {"stops": 0.0, "stops waiting": LATER_S}.get(how)
    return group.serve()
