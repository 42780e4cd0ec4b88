"""Node programs of one job on this host, each bound to an address of its own, of the loopback unless one is given."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from ctpo_launchers.job import free_ports
from ctpo_megatron.base.processes import wait_for
from tests.support.deadlines import awaited, scaled
from tests.support.prefork import PYTHONPATH, ROOT

ADDRESSES = {0: "127.0.0.2", 1: "127.0.0.3"}
_JOBS = itertools.count()


class Programs:
    """The node programs of `ranks`, one of `addresses` for each node of the job; they print to `directory`/out<rank>.

    before: words before a node's command.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Sequence[int],
        options: Sequence[str],
        arguments: Sequence[str],
        addresses: Mapping[int, str] = ADDRESSES,
        before: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.directory, self._addresses, self._before = directory, addresses, before or {}
        first = 21000 + (os.getpid() * 8 + next(_JOBS)) % 5000
        port = str(free_ports(addresses[0], first, 1)[0])
        self._common = ["--head", addresses[0], "--port", port, "--directory", str(directory)]
        self._common += ["--module", "tests.launchers.payload", *options]
        self._arguments = ["--", str(ROOT / "configs" / "quickstart.yaml"), *arguments]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.family: set[psutil.Process] = set()
        for rank in ranks:
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start the node program of a rank."""
        program = [*self._before.get(rank, ()), sys.executable, "-m", "ctpo_launchers.node"]
        own = ["--nodes", str(len(self._addresses)), "--node-rank", str(rank), "--address", self._addresses[rank]]
        self.processes[rank] = subprocess.Popen(
            [*program, *own, *self._common, *self._arguments],
            stdout=(self.directory / f"out{rank}").open("wb"),
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
            start_new_session=True,
        )

    def output(self, rank: int) -> str:
        return (self.directory / f"out{rank}").read_text()

    def until(self, text: str, rank: int = 0, seconds: float = 100) -> None:
        """Wait until a node has printed a text."""
        awaited(lambda: text in self.output(rank) or self.processes[rank].poll() is not None, seconds, every=0.1)
        assert text in self.output(rank), f"no {text!r} in\n{self.output(rank)}"
        self.family |= set(self.children())

    def until_runs(self, word: str, count: int, seconds: float = 60) -> None:
        """Wait until so many processes run whose command lines hold a word."""
        there = awaited(lambda: len(self.children(word)) == count, seconds, every=0.2)
        assert there, f"{self.children(word)} and not {count} of {word!r}"

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
        return [_command(process) for process in wait_for(self.family, scaled(seconds))]

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
    directory: Path,
    *arguments: str,
    ranks: Sequence[int] = (0, 1),
    options: Sequence[str] = (),
    addresses: Mapping[int, str] = ADDRESSES,
    before: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[Programs]:
    programs = Programs(directory, ranks, options, arguments, addresses, before)
    try:
        yield programs
    finally:
        programs.kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
