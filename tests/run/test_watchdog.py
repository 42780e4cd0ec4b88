"""The watchdog on real ranks: who keeps the others waiting is named, stacks are dumped, and the run goes on."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ctpo_megatron.policy import RankZero
from ctpo_megatron.run.stall import Place, StoppedProcesses, describe
from ctpo_megatron.run.watchdog import END_STATUS, Watchdog
from ctpo_megatron.tracking import Progress, read_heartbeat
from tests.support.deadlines import scaled

BEAT_S, TIMEOUT_S = 0.2, 1.0
DEADLINE_S = 60
Play = Callable[[Progress, RankZero | None], None]


def _rank(rank: int, ranks: int, port: int, folder: Path, play: Play, end: bool) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    bridge = RankZero(lost_after_s=DEADLINE_S) if ranks > 1 else None
    progress = Progress()
    with Watchdog(progress, bridge, folder, timeout_s=TIMEOUT_S, end=end, beat_s=BEAT_S):
        play(progress, bridge)
    time.sleep(0.5 if rank == 0 else 0.0)  # the store ends with rank zero
    os._exit(0)


@pytest.fixture
def start() -> Iterator[Callable[..., list[Any]]]:
    """Starts ranks that play something under a watchdog."""
    processes: list[Any] = []

    def start(ranks: int, folder: Path, play: Play, *, end: bool = False) -> list[Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork")
        processes.extend(
            context.Process(target=_rank, args=(rank, ranks, port, folder, play, end)) for rank in range(ranks)
        )
        for process in processes:
            process.start()
        return processes

    yield start
    for process in processes:
        process.kill()
        process.join()


def statuses(processes: list[Any]) -> list[int | None]:
    for process in processes:
        process.join(scaled(DEADLINE_S))
    return [process.exitcode for process in processes]


def appears(path: Path, text: str) -> str:
    """The content of a file once it has the text in it."""
    until = time.monotonic() + scaled(DEADLINE_S)
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < until, f"{path} has no {text!r}: {path.read_text() if path.exists() else 'no file'}"
        time.sleep(0.05)
    return path.read_text()


def oversleep() -> None:
    time.sleep(5 * TIMEOUT_S)


def test_who_keeps_the_others_waiting_is_named_and_the_run_goes_on(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def play(progress: Progress, bridge: RankZero | None) -> None:
        assert bridge is not None
        values = torch.ones(3)
        with progress.within("update"):
            if bridge.rank == 1:
                oversleep()
            dist.all_reduce(values)
        assert values.tolist() == [2.0] * 3
        bridge.run(oversleep)

    processes = start(2, tmp_path, play)
    assert statuses(processes) == [0, 0]
    zero, one = (f"rank {n} (process {process.pid} on {socket.gethostname()})" for n, process in enumerate(processes))
    first, second = (tmp_path / "stalls" / "report.txt").read_text().split("no progress for ")[1:]
    assert f"{zero} waits for {one}\n" in first
    assert f"\n  {one}: in no collective; phase update; " in first
    assert "in oversleep: time.sleep(5 * TIMEOUT_S)" in first
    assert f"\n  {zero}: waits in all_reduce, number " in first and "of default_pg, Float [3]; phase update; " in first
    assert f"{one} waits for {zero}\n" in second
    assert f"\n  {one}: waits for rank 0; phase none; " in second
    for rank, line in ((0, "in all_reduce"), (1, "in oversleep")):
        assert line in (tmp_path / "stalls" / f"rank_{rank}.txt").read_text().split("waits for rank 0")[0]
    heartbeat = read_heartbeat(tmp_path)
    assert heartbeat is not None and (heartbeat.state, heartbeat.stalls, heartbeat.ranks) == ("ended", 2, 2)


def test_ranks_end_together_if_asked_to(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    def play(progress: Progress, bridge: RankZero | None) -> None:
        if bridge is not None and bridge.rank == 1:
            time.sleep(scaled(DEADLINE_S))
        dist.barrier()

    assert statuses(start(2, tmp_path, play, end=True)) == [END_STATUS, END_STATUS]
    assert "waits in barrier" in (tmp_path / "stalls" / "report.txt").read_text()


def test_a_rank_that_is_stopped_is_named(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    def play(progress: Progress, bridge: RankZero | None) -> None:
        if bridge is not None and bridge.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    stopped = start(2, tmp_path, play)[1]
    name = f"rank 1 (process {stopped.pid} on {socket.gethostname()})"
    assert f"\n  {name}: no answer;" in appears(tmp_path / "stalls" / "report.txt", "no progress")


def test_code_that_keeps_the_lock_of_python_is_dumped(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    def play(progress: Progress, bridge: RankZero | None) -> None:
        ctypes.PyDLL(None).usleep(int(4 * TIMEOUT_S * 1e6))

    processes = start(1, tmp_path, play)
    text = appears(tmp_path / "stalls" / "rank_0.txt", "Timeout")
    assert "in play" in text
    assert statuses(processes) == [0]


def test_the_heartbeat_says_where_a_run_is(tmp_path: Path) -> None:
    progress = Progress()
    progress.step = 7
    with (
        pytest.raises(ValueError),
        Watchdog(progress, None, tmp_path, timeout_s=None, beat_s=0.01),
        progress.within("rl"),
        progress.within("update"),
    ):
        appears(tmp_path / "heartbeat.json", "rl/update")
        living = read_heartbeat(tmp_path)
        raise ValueError
    last = read_heartbeat(tmp_path)
    assert living is not None and last is not None
    assert (living.state, living.step, living.pid, living.host) == ("running", 7, os.getpid(), socket.gethostname())
    assert living.progress <= living.time <= last.time <= time.time()
    assert (last.state, last.phase) == ("failed", "")


def test_nothing_is_left_of_a_run_that_never_stood_still(tmp_path: Path) -> None:
    progress = Progress()
    with Watchdog(progress, None, tmp_path, timeout_s=TIMEOUT_S, beat_s=BEAT_S):
        for _ in range(10):
            time.sleep(TIMEOUT_S / 5)
            progress.advance()
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]


def test_ranks_of_the_same_place_share_a_line() -> None:
    names = [f"rank {rank} (process {rank} on host)" for rank in range(8)]
    waiting = Place("update", "a.py:1 in f: g()", ["all_reduce, number 3 of dp"])
    places = dict.fromkeys((0, 1, 2, 4, 6, 7), waiting) | {3: Place("rollout", "b.py:2 in h: i()")}
    assert describe(places, names).splitlines() == [
        "ranks 0-2, 4, 6-7 wait for ranks 3, 5",
        "  rank 5 (process 5 on host): no answer; stopped, gone, or in C code that keeps Python's lock",
        "  rank 3 (process 3 on host): in no collective; phase rollout; b.py:2 in h: i()",
        "  ranks 0-2, 4, 6-7: waits in all_reduce, number 3 of dp; phase update; a.py:1 in f: g()",
    ]
    mismatch = describe({0: waiting, 1: waiting}, names[:2])
    assert mismatch.startswith("every rank waits for others: their collectives differ")


# --- processes of a run that are stopped are named, once, and when they run again ---

_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    """A child with a child of its own."""
    with subprocess.Popen([sys.executable, "-c", _PARENT]) as started:
        found = psutil.Process(started.pid)
        while not found.children():
            time.sleep(0.01)
        yield found
        for each in (*found.children(), found):
            each.kill()


def send(process: psutil.Process, number: signal.Signals, status: str) -> None:
    os.kill(process.pid, number)
    while (process.status() == psutil.STATUS_STOPPED) != (status == psutil.STATUS_STOPPED):
        time.sleep(0.01)


def test_a_process_that_is_stopped_is_named(process: psutil.Process, caplog: pytest.LogCaptureFixture) -> None:
    stopped = StoppedProcesses()
    send(process, signal.SIGSTOP, psutil.STATUS_STOPPED)
    stopped.check()
    assert caplog.text == ""  # it may have been for a moment
    stopped.check()
    stopped.check()
    send(process, signal.SIGCONT, psutil.STATUS_SLEEPING)
    stopped.check()
    stopped.check()
    named, back = (record.getMessage() for record in caplog.records)
    assert f"(process {process.pid}) is stopped; what waits for it continues after kill -CONT {process.pid}" in named
    assert back == f"process {process.pid} is not stopped any more"


def test_what_a_process_runs_for_others_is_its_own_affair(
    process: psutil.Process, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs of the sandbox stop themselves as they like."""
    [grandchild] = process.children()
    send(grandchild, signal.SIGSTOP, psutil.STATUS_STOPPED)
    stopped = StoppedProcesses()
    stopped.check()
    stopped.check()
    assert caplog.text == ""
