"""What rank zero does alone: the others get its result, its failure, or the name of the rank that died meanwhile."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ctpo_megatron.base.stop import TRY_AGAIN
from ctpo_megatron.policy import RankLost, RankZeroError
from ctpo_megatron.policy.rank_zero import RankZero

Play = Callable[[RankZero, int], Any]
RANKS = 3
DEADLINE_S = 120
FROZEN_S = 12.0


def _rank(rank: int, port: int, play: Play, leave_s: float, answers: Any, answered: Any, collective_s: float) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=collective_s))
    bridge = RankZero(beat_s=0.2, lost_after_s=3.0, leave_s=leave_s, frozen_s=FROZEN_S)
    try:
        answers.put((rank, os.getpid(), play(bridge, rank)))
    except (RankLost, RankZeroError, ValueError) as error:
        answers.put((rank, os.getpid(), error))
    answers.close()
    answers.join_thread()
    answered.wait(DEADLINE_S)  # the store ends with rank zero, and the slowest rank may still need it
    os._exit(0)


def play_on_ranks(
    play: Play, dying: int | None = None, leave_s: float = 2.0, *, ending: int = 0
) -> tuple[dict[int, Any], list[int]]:
    """Answers of the ranks that live, by rank, and the process ids of all.

    ending: ranks that end instead of answering, with a status; of collectives that take as long as they like.
    """
    context = multiprocessing.get_context("fork")
    answers, answered = context.Queue(), context.Event()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rest = play, leave_s, answers, answered, 4.0 * DEADLINE_S if ending else 2.0
    ranks = [context.Process(target=_rank, args=(rank, port, *rest)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        found = [answers.get(timeout=DEADLINE_S) for _ in range(RANKS - (dying is not None) - ending)]
        if ending:
            sentinels = {process.sentinel: process for rank, process in enumerate(ranks) if rank != dying}
            for sentinel in wait([*sentinels], timeout=DEADLINE_S):
                sentinels[sentinel].join()  # a process closes its pipes before it has a status
            found = [(rank, 0, process.exitcode) for rank, process in enumerate(ranks)]
    finally:
        answered.set()
        for process in ranks:
            process.kill()
            process.join()
    return {rank: answer for rank, _, answer in found}, [process.pid or 0 for process in ranks]


def watch(bridge: RankZero, seconds: float = math.inf) -> None:
    """Check the others for so long; without end it ends by RankLost, or the test fails at its deadline."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        bridge.check()
        time.sleep(0.05)


def called(rank: int, processes: list[int]) -> str:
    """As messages name a rank."""
    return f"rank {rank} (process {processes[rank]} on {socket.gethostname()})"


def test_every_rank_has_the_result_though_it_took_longer_than_a_collective_may() -> None:
    def play(bridge: RankZero, rank: int) -> list[Any]:
        slow = bridge.run(lambda: time.sleep(4.0) or f"done by {rank}")
        return [slow, *(bridge.run(lambda n=n: n * n) for n in range(50)), bridge.run(lambda: bytes(range(256)) * 4096)]

    answers, _ = play_on_ranks(play)
    expected = ["done by 0", *(n * n for n in range(50)), bytes(range(256)) * 4096]
    assert answers == dict.fromkeys(range(RANKS), expected)


def test_rank_zero_raises_and_the_others_stop_with_it() -> None:
    def play(bridge: RankZero, rank: int) -> None:
        def refuse() -> None:
            raise ValueError("runs/x exists\nand more")

        bridge.run(refuse)

    answers, _ = play_on_ranks(play)
    assert isinstance(answers[0], ValueError)
    for rank in (1, 2):
        assert isinstance(answers[rank], RankZeroError)
        assert str(answers[rank]) == f"rank {rank} stops, rank 0 failed: ValueError: runs/x exists"


def test_a_rank_that_dies_while_rank_zero_samples_is_named() -> None:
    def play(bridge: RankZero, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        bridge.run(lambda: watch(bridge))

    answers, processes = play_on_ranks(play, dying=1)
    said = f"{called(1, processes)} gave no sign of life for"
    assert isinstance(answers[0], RankLost) and str(answers[0]).startswith(said)
    assert said in str(answers[2])


class Warnings(logging.Handler):
    """What a rank has logged since this was made."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("ctpo_megatron").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def frozen(seconds: float) -> None:
    """Stop this process, which another one lets go on."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_frozen_is_named_and_welcome_when_it_is_back(who: int) -> None:
    def play(bridge: RankZero, rank: int) -> tuple[list[str], str]:
        said = Warnings()
        bridge.run(lambda: None)
        if rank == who:
            frozen(6.0)
        watch(bridge, 9.0)
        return said.lines, bridge.run(lambda: "on")

    answers, processes = play_on_ranks(play)
    assert {on for _, on in answers.values()} == {"on"}
    witness = 1 if who == 0 else 0
    name = called(who, processes)
    named, back = [line for line in answers[witness][0] if line.startswith(name)]  # the third may be late, too
    assert named.startswith(f"{name} gave no sign of life for 3 s: is it frozen") and "12 s at most" in named
    assert back.startswith(f"{name} is back after ")


def test_a_rank_that_stays_frozen_is_lost() -> None:
    def play(bridge: RankZero, rank: int) -> float:
        bridge.run(lambda: None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"rank 1 .*gave no sign of life for"):
            watch(bridge)
        return time.monotonic() - began

    answers, _ = play_on_ranks(play, dying=1)
    assert all(FROZEN_S - 1 < seconds < 3 * FROZEN_S for seconds in answers.values())


def test_a_collective_with_a_rank_that_stays_frozen_ends() -> None:
    def play(bridge: RankZero, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.zeros(1))

    statuses, _ = play_on_ranks(play, dying=1, ending=2)
    assert TRY_AGAIN in (statuses[0], statuses[2])  # the first that ends


def test_rank_zero_that_dies_is_named_by_all() -> None:
    def play(bridge: RankZero, rank: int) -> None:
        bridge.run(lambda: os.kill(os.getpid(), signal.SIGKILL))

    answers, processes = play_on_ranks(play, dying=0)
    for rank in (1, 2):
        assert isinstance(answers[rank], RankLost)
        assert f"{called(0, processes)} is gone" in str(answers[rank])


def test_a_rank_that_left_on_purpose_is_not_missed() -> None:
    def play(bridge: RankZero, rank: int) -> str:
        bridge.run(lambda: None)
        if rank == 1:
            bridge.close()
            return "left"
        time.sleep(5.0)  # longer than a silent rank is waited for
        bridge.check()
        return "stayed"

    answers, _ = play_on_ranks(play)
    assert answers == {0: "stayed", 1: "left", 2: "stayed"}


def test_rank_zero_leaves_last() -> None:
    def play(bridge: RankZero, rank: int) -> float:
        time.sleep(1.0 if rank == 2 else 0.0)  # the last result is read late
        bridge.run(lambda: None)
        through = time.monotonic()  # one clock for all processes
        bridge.close()
        return through if rank else time.monotonic()

    answers, _ = play_on_ranks(play, leave_s=DEADLINE_S)
    assert answers[0] > max(answers[1], answers[2])


def test_rank_zero_does_not_wait_for_ever_for_one_that_stays() -> None:
    def play(bridge: RankZero, rank: int) -> float:
        began = time.monotonic()
        if rank != 2:
            bridge.close()
        return time.monotonic() - began

    answers, _ = play_on_ranks(play, leave_s=0.5)
    assert answers[0] >= 0.5
