"""The process that collects what checkpoint writers report: it is replaced whenever it is killed."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from ctpo_megatron.policy import results_queue
from ctpo_megatron.policy.results_queue import start_results_queue
from tests.end_to_end.small_run import Ctpo
from tests.support import children
from tests.support.deadlines import scaled
from tests.support.kills import signalled_as_they_start, with_word


def keepers() -> list[Any]:
    """The processes of queues that live."""
    return [child for child in multiprocessing.active_children() if child.name.startswith("SyncManager")]


@pytest.fixture(autouse=True)
def none_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    before = keepers()
    yield
    for keeper in keepers():
        if keeper not in before:
            keeper.kill()


def killed_while_they_start(count: int, number: int = signal.SIGKILL) -> AbstractContextManager[None]:
    """So many of the processes of queues."""

    def spawned() -> list[psutil.Process]:
        return with_word(psutil.Process().children(), "multiprocessing.spawn")

    return signalled_as_they_start(spawned, count, number)


def is_usable() -> bool:
    """Whether a value passes the queue, once."""
    queue: Any = filesystem_async._results_queue
    queue.put({"rank": 0})
    deadline = time.monotonic() + scaled(10)
    while time.monotonic() < deadline:
        try:
            return bool(queue.get_nowait() == {"rank": 0})
        except Empty:
            time.sleep(0.01)
    return False


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_is_killed_while_it_starts_is_replaced(times: int, caplog: pytest.LogCaptureFixture) -> None:
    with killed_while_they_start(times):
        assert start_results_queue() == ""
    assert [line.levelname for line in caplog.records] == ["WARNING"] * times
    assert "attempt 1: EOFError" in caplog.text or "attempt 1: BrokenPipeError" in caplog.text
    assert is_usable()


def test_one_that_is_killed_before_its_queue_is_made_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start: Callable[..., None] = SyncManager.start

    def start_and_kill(manager: SyncManager, *arguments: Any) -> None:
        before = keepers()
        start(manager, *arguments)
        if not caplog.records:
            (keeper,) = [each for each in keepers() if each not in before]
            keeper.kill()
            keeper.join()

    monkeypatch.setattr(SyncManager, "start", start_and_kill)
    assert start_results_queue() == ""
    assert len(caplog.records) == 1 and "did not start (attempt 1: " in caplog.text
    assert is_usable()


def test_one_that_is_frozen_while_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(results_queue, "_START_S", scaled(5))
    with killed_while_they_start(1, signal.SIGSTOP):
        assert start_results_queue() == ""
    assert f" has not answered for {scaled(5):g} s, and is killed" in caplog.text
    assert is_usable()


def test_one_that_is_always_killed_is_said_and_may_start_later() -> None:
    with killed_while_they_start(3):
        reason = start_results_queue()
    assert "did not start in 3 attempts (" in reason and "is something killing the processes" in reason
    assert start_results_queue() == "" and is_usable()


@pytest.mark.slow
def test_a_process_that_is_ended_while_it_prepares_to_save_does_not_stay(tmp_path: Path) -> None:
    """By a second Ctrl-C, or because its time is up. Other child processes are left to end by themselves."""
    lines = [
        "import multiprocessing, os, signal, sys, threading, time",
        "from ctpo_megatron.policy.results_queue import start_results_queue",
        "def work(): time.sleep(3); print('worked to its end', flush=True)",
        "multiprocessing.get_context('fork').Process(target=work).start()",
        "def interrupt():",
        "    while len(multiprocessing.active_children()) < 2: time.sleep(0.01)",
        "    os.kill(os.getpid(), signal.SIGALRM)",
        "signal.signal(signal.SIGALRM, lambda *_: sys.exit(5))",
        "threading.Thread(target=interrupt).start()",
        "try: start_results_queue()",
        "except SystemExit as error: kept = error",  # with its frames, which hold the queue's pipe open
        "sys.exit(kept.code)",
    ]
    program = [sys.executable, "-c", "\n".join(lines)]
    ended = children.run(program, directory=tmp_path, environment=Ctpo(tmp_path).environment, deadline_s=50)
    assert ended.returncode == 5, ended.stderr[-2000:]
    assert ended.stdout == "worked to its end\n"
