"""A server that fails over some programs, or over all once a file exists. None known to us does that to it today."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from ctpo_sandbox import SandboxServer
from tests.support.deadlines import scaled

FRAGILE = """
import contextlib, os, signal, subprocess, sys, threading
from pathlib import Path
import psutil
from ctpo_sandbox.errors import RunFault, WorkerLost
from ctpo_sandbox.server import pool, processes
run, finish, start = processes.Worker.run, processes.Worker.finish, subprocess.Popen.__init__
folder, killed = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
faults, losses, started = [RunFault("killed by signal 9")], [WorkerLost("died")], []

def kill_the_run(worker, over):
    while not over.wait(0.3):
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(worker).children():
                child.kill()

async def failing(worker, files, run_timeout_s):
    code = os.pread(files[0], 100, 0)
    if b"WORKER" in code or (folder / "broken").exists():
        os.kill(worker.pid, signal.SIGKILL)
    if b"RAISES" in code or (folder / "raising").exists():
        raise WorkerLost("died", raised=True)
    if b"FAULT" in code and faults:
        raise faults.pop()
    if b"DEFECT" in code:
        raise ZeroDivisionError("a \\ud800 defect")
    if b"LATE" in code:
        raise TimeoutError("of the run's own")
    over = threading.Event()
    if b"KILLED" in code:
        threading.Thread(target=kill_the_run, args=[worker.pid, over]).start()
    try:
        return await run(worker, files, run_timeout_s)
    finally:
        over.set()

async def failing_finish(worker):
    if not faults and losses:
        raise losses.pop()
    await finish(worker)

def start_and_kill(process, *arguments, **options):
    start(process, *arguments, **options)
    started.append(process)
    if len(started) <= killed:
        process.kill()

processes.Worker.run, processes.Worker.finish = failing, failing_finish
subprocess.Popen.__init__ = start_and_kill
missing = pool.Pool.missing.fget
pool.Pool.missing = property(lambda self: 1 / 0 if (folder / "sick").exists() else missing(self))
from ctpo_sandbox.server import main
raise SystemExit(main())
"""
OPTIONS = ["--slots", "2", "--tiers", "stdlib"]


@contextlib.contextmanager
def fragile(folder: Path, number: int = 0, *, killed: int = 0) -> Iterator[SandboxServer]:
    """It fails over programs that hold `WORKER`, `RAISES`, `FAULT` (once), `DEFECT`, `LATE` or `KILLED`.

    In `folder` the files `broken` and `raising` have it fail over all, and `sick` over `GET /health`. killed: how many
    of the first processes of its own are killed as they start.
    """
    command = [sys.executable, "-c", FRAGILE, str(folder), str(killed), *OPTIONS]
    with SandboxServer(command, folder / f"log{number}", scaled(60)) as server:
        yield server
