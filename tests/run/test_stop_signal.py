"""What sets the stop signal, what a run does then, and what is known of the time it has."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.base.stop import ENDING, StopSignal, job_end, warn_of_short_grace


@pytest.fixture(autouse=True)
def former_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGALRM)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "name", "status"),
    [
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGUSR1, "SIGUSR1", 143),
        (signal.SIGHUP, "SIGHUP", 143),
        (signal.SIGINT, "Ctrl-C", 130),
    ],
)
def test_every_way_to_ask_saves_where_there_is_something_and_ends_the_process_elsewhere(
    number: signal.Signals, name: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = StopSignal(grace_s=60)
    with stop.deferred():
        assert not stop.is_set()
        for _ in range(2):  # the second is one press of Ctrl-C that came twice, or no news
            send(number)
        assert stop.is_set()
    assert stop.leave() == status
    send(number)  # while engines and sandbox are closed
    assert capfd.readouterr().err == f"{name}: a checkpoint follows, within 60 s (checkpoint.grace_s)\n"
    StopSignal(grace_s=60)
    with pytest.raises(SystemExit) as ended:
        send(number)
    assert ended.value.code == status
    assert capfd.readouterr().err == f"{name}: stopping now; no training step is running\n"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM])
def test_what_is_asked_again_does_not_interrupt_the_end(
    second: signal.Signals, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm repeats itself, and the job's end may come meanwhile; engines and sandbox are to be closed."""
    StopSignal(grace_s=60, job_end=time.time() + 3600)
    closed = False
    with pytest.raises(SystemExit) as ended:
        try:
            send(signal.SIGTERM)
        finally:
            send(second)
            closed = True
    assert closed and ended.value.code == 143
    assert capfd.readouterr().err == "SIGTERM: stopping now; no training step is running\n"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    with pytest.raises(SystemExit):  # something swallowed the first
        send(signal.SIGTERM)


def test_all_ranks_stop_when_one_is_to_stop() -> None:
    """The others with the status of rank zero."""
    for gather, status in ((lambda mine: [mine, True, False], 143), (lambda mine: [75, mine], 75)):
        stop = StopSignal(grace_s=60)
        with stop.deferred():
            assert not stop.agreed(lambda mine: [mine, False]) and not stop.is_set()
            assert stop.agreed(gather) and stop.is_set()
            assert 59 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60  # its own grace, not that of the job's end
            send(signal.SIGTERM)  # no news
        assert stop.leave() == status


def test_a_fault_that_asks_saves_and_ends_with_the_status_of_one_that_passes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stop = StopSignal(grace_s=60)
    with stop.deferred():
        thread = threading.Thread(target=stop.ask, args=("Ray's GCS (process 7) died",))
        thread.start()
        thread.join()
        assert stop.is_set() and 59 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        stop.ask("and more")
        send(signal.SIGTERM)  # no news
    assert stop.leave() == 75
    assert capfd.readouterr().err == (
        "Ray's GCS (process 7) died: a checkpoint follows, within 60 s (checkpoint.grace_s)\n"
    )


def test_a_fault_before_there_is_something_to_save_is_said_when_there_is(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopSignal(grace_s=60, job_end=time.time() + 3600)
    stop.ask("Ray's GCS (process 7) died")
    assert stop.is_set() and capfd.readouterr().err == ""
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 3000  # the job's end still counts
    with stop.deferred():
        assert "died: a checkpoint follows" in capfd.readouterr().err
    assert stop.leave() == 75


def test_a_second_ctrl_c_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopSignal(grace_s=60)
    with stop.deferred():
        send(signal.SIGINT)
        time.sleep(1.1)
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGINT)
    assert ended.value.code == 130
    assert capfd.readouterr().err.endswith("Ctrl-C again: stopping now, without a checkpoint\n")


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignal(grace_s=60)
    with stop.deferred():
        send(signal.SIGHUP)
        assert not stop.is_set()
        send(signal.SIGTERM)
        assert stop.is_set()


def test_a_run_that_nobody_hears_saves_as_well() -> None:
    """Ctrl-C ends `tee`, too, and a terminal that is closed takes no more lines."""
    reader, writer = os.pipe()
    os.close(reader)
    stop, stderr = StopSignal(grace_s=60), os.dup(2)
    try:
        os.dup2(writer, 2)
        with stop.deferred():
            send(signal.SIGINT)
    finally:
        os.dup2(stderr, 2)
        for descriptor in (stderr, writer):
            os.close(descriptor)
    assert stop.is_set() and stop.leave() == 130


def test_a_grace_that_runs_out_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopSignal(grace_s=0.1)
    with stop.deferred(), pytest.raises(SystemExit) as ended:
        send(signal.SIGUSR1)
        signal.pause()
    assert ended.value.code == 143
    assert "not done within 0.1 s of SIGUSR1 (checkpoint.grace_s)" in capfd.readouterr().err


def test_the_clock_asks_when_the_grace_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    stop = StopSignal(grace_s=60, job_end=time.time() + 60.2)
    with stop.deferred():
        assert not stop.is_set()
        signal.pause()
        assert stop.is_set()
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 59  # of the grace
    assert "the job's end: a checkpoint follows, within 60 s" in capfd.readouterr().err
    with pytest.raises(SystemExit):  # too late to begin anything
        StopSignal(grace_s=60, job_end=time.time() + 30)
        signal.pause()
    assert time.monotonic() - started < 30


def test_a_forked_process_goes_on(tmp_path: Path) -> None:
    """One writes checkpoints, and a scheduler's signal reaches it, too."""
    stop = StopSignal(grace_s=60)
    with stop.deferred():
        if (child := os.fork()) == 0:
            for number in (*ENDING, signal.SIGINT):
                send(number)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not stop.is_set()


def test_when_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert job_end(None) is None
    soon = int(time.time()) + 100
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(soon))
    assert job_end(None) == soon
    run = {"name": "demo", "root": str(tmp_path), "steps": 5, "deadline": soon + 50}
    assert job_end(run["deadline"]) == soon + 50
    assert caplog.text == ""
    for former in (str(soon - 200), "unlimited"):
        monkeypatch.setenv("SLURM_JOB_END_TIME", former)
        assert job_end(None) is None
        assert f"SLURM_JOB_END_TIME={former} is no time to come and is ignored" in caplog.text


def test_a_grace_that_torchrun_cuts_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING):
        warn_of_short_grace(120)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        warn_of_short_grace(20)
        assert caplog.text == ""
        warn_of_short_grace(120)
    assert "checkpoint.grace_s is 120 s, but torchrun kills its ranks 30 s after SIGTERM" in caplog.text
