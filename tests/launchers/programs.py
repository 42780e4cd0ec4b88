"""Node programs of one job on this host, each bound to a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from ctpo_launchers.network import free_ports
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

HEAD = "127.0.0.2"


class Programs:
    """`nodes` node programs; what they print is in `directory`/out<rank>."""

    def __init__(self, directory: Path, ranks: Sequence[int], options: Sequence[str], arguments: Sequence[str]) -> None:
        self.directory = directory
        port = str(free_ports(HEAD, 21000 + os.getpid() % 5000, 1)[0])
        paths = [str(ROOT), *(str(ROOT / folder) for folder in ("kernels", "sandbox", "launchers"))]
        self.processes = {
            rank: subprocess.Popen(
                [
                    *(sys.executable, "-m", "ctpo_launchers.node", "--nodes", "2", "--node-rank", str(rank)),
                    *("--head", HEAD, "--address", f"127.0.0.{2 + rank}", "--port", port),
                    *("--directory", str(directory), "--module", "tests.launchers.payload", *options),
                    *("--", str(ROOT / "configs" / "quickstart.yaml"), *arguments),
                ],
                stdout=(directory / f"out{rank}").open("wb"),
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
            for rank in ranks
        }
        self.family: set[psutil.Process] = set()

    def output(self, rank: int) -> str:
        return (self.directory / f"out{rank}").read_text()

    def until(self, text: str, rank: int = 0, seconds: float = 100) -> None:
        """Wait until a node has printed a text."""
        deadline = time.monotonic() + scaled(seconds)
        while text not in self.output(rank):
            assert time.monotonic() < deadline, f"no {text!r} in\n{self.output(rank)}"
            assert self.processes[rank].poll() is None, self.output(rank)
            time.sleep(0.1)
        self.family |= set(self.children())

    def until_runs(self, word: str, count: int, seconds: float = 60) -> None:
        """Wait until so many processes run whose command lines hold a word."""
        deadline = time.monotonic() + scaled(seconds)
        while len(found := self.children(word)) != count:
            assert time.monotonic() < deadline, f"{found} and not {count} of {word!r}"
            time.sleep(0.2)

    def children(self, word: str = "", of: int | None = None) -> list[psutil.Process]:
        """What the programs have started, or one of them, of which the command line holds a word."""
        found = []
        for rank, process in self.processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(process.pid).children(recursive=True) if of in (None, rank) else []
        return [process for process in found if word in _command(process)]

    def statuses(self, seconds: float = 60) -> dict[int, int]:
        """Exit statuses of the programs, all of which end."""
        return {rank: process.wait(scaled(seconds)) for rank, process in self.processes.items()}

    def survivors(self, seconds: float = 10) -> list[str]:
        """What was seen to run under the programs and still does."""
        _, alive = psutil.wait_procs(list(self.family), timeout=scaled(seconds))
        return [_command(process) for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        for process in [*self.children(), *self.family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def running(
    directory: Path, *arguments: str, ranks: Sequence[int] = (0, 1), options: Sequence[str] = ()
) -> Iterator[Programs]:
    programs = Programs(directory, ranks, options, arguments)
    try:
        yield programs
    finally:
        programs.kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
