"""`ctpo train` over two ranks: one is killed or frozen in a step and is named, and another start continues."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.stop import TRY_AGAIN
from tests.end_to_end.killed_train import points
from tests.end_to_end.small_run import records
from tests.end_to_end.test_kill_resume import STEPS, command, folder, train_on_a_rank
from tests.support import ranks
from tests.support.deadlines import scaled

__all__ = ["folder"]
"""The fixture, with the recording that the ranks replay."""
TIMEOUT_S = scaled(20)
SETTINGS = ("run.resume=auto", "policy.tensor_model_parallel_size=2", f"policy.timeout_minutes={TIMEOUT_S / 60:g}")
UPDATES = 2
"""Optimizer steps of an RL step."""


def disturbed(directory: Path, arguments: list[str], number: int) -> int:
    """Train; rank 1 sends itself a signal in its second step. What a rank prints goes to a file."""
    rank, calls = int(os.environ["RANK"]), 0
    output = os.open(directory / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    owner, name, _ = points()["update"]
    original = getattr(owner, name)

    def update(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if (rank, calls) == (1, UPDATES + 1):
            os.kill(os.getpid(), number)
        return original(*given, **named)

    setattr(owner, name, update)
    return train_on_a_rank(directory, arguments)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_rank_that_is_lost_is_named_and_the_run_continues(folder: Path, number: signal.Signals) -> None:
    settings = (*SETTINGS, f"run.name=lost-{number.name}")
    arguments = folder, command(*settings), number
    ended = ranks.endings(disturbed, *arguments, ranks=2, deadline_s=300, lasting={1} & {int(number == signal.SIGSTOP)})
    (status, _), (_, lost) = ended
    said = (folder / "rank_0.log").read_text()
    assert status == TRY_AGAIN, said[-4000:]
    assert f"ctpo: rank 1 (process {lost} on {socket.gethostname()}): " in said and "Traceback" not in said
    run = folder / "runs" / f"lost-{number.name}"
    assert json.loads((run / "heartbeat.json").read_text())["state"] == "failed"
    assert [path.name for path in (run / "checkpoints").iterdir()][-1:] == ["step_000001"]
    assert ranks.run(train_on_a_rank, folder, command(*settings), ranks=2) == [0, 0]
    assert [line["step"] for line in records(run)] == list(range(STEPS + 1))
