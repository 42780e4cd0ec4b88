"""The server's side of its processes: templates with libraries imported, and the workers that they fork."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ctpo_sandbox.errors import LevelRefused, RunFault, WorkerLost
from ctpo_sandbox.inside.libraries import Library
from ctpo_sandbox.inside.template import BIND_NOW, Boot
from ctpo_sandbox.isolation.control_groups import MemoryGroup
from ctpo_sandbox.records import FAILED, READY, STOP, WALL_FACTOR, ChildOutcome, Limits
from ctpo_sandbox.server.channel import Channel
from ctpo_sandbox.timeouts import BACKSTOP_S, CLEANING_TIMEOUT_S, WORKER_START_TIMEOUT_S

_PACKAGE = Path(__file__).resolve().parents[1]
# By its folder: a template does not inherit PYTHONPATH.
_BOOT = (
    "import sys, types; package = types.ModuleType('ctpo_sandbox'); package.__path__ = [{package!r}]; "
    "sys.modules['ctpo_sandbox'] = package; from ctpo_sandbox.inside.template import Boot, Library, Limits, main; "
    "main({boot!r})"
)


def _environment() -> dict[str, str]:
    """The environment of every snippet: no variables of the trainer, one thread per numerical library."""
    one_thread = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "1",
        "MPLBACKEND": "Agg",
        **dict.fromkeys(one_thread, "1"),
    }


def _binding_folder() -> str | None:
    """Where the server finds pyseccomp: a folder of PYTHONPATH, perhaps, which templates do not inherit."""
    spec = importlib.util.find_spec("pyseccomp")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


class Template:
    """A process with one tier of libraries imported, from which workers are forked; replaced when lost."""

    def __init__(
        self,
        library: Library,
        level: str,
        limits: Limits,
        root: Path,
        start_timeout_s: float,
        user_ids: tuple[int, ...] = (),
    ) -> None:
        self.library, self.level, self.limits, self._start_timeout_s = library, level, limits, start_timeout_s
        self.missing: dict[str, str] = {}
        self.starts = 0
        self._root, self._user_ids = root, user_ids
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def spawn(self, slot: int, directory: str) -> tuple[Channel, int]:
        """Return a new worker: its channel and a pidfd. Raises as `Worker.ensure_started`.

        Must not be cancelled: the template would have to be killed, with all its workers.
        """
        async with self._one_at_a_time:
            await self._ensure_started()
            assert self._channel is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel = Channel(f"worker {slot} ({self.library.name})", ours)
            try:
                with theirs:
                    request = {"slot": slot, "directory": directory}
                    self._channel.send(json.dumps(request).encode(), [theirs.fileno()])
                reply, descriptors = await self._channel.receive_descriptor(WORKER_START_TIMEOUT_S, "to fork a worker")
            except BaseException:
                channel.close()
                self.kill()
                raise
        if not descriptors:
            channel.close()
            raise RunFault(f"{channel.name}: could not fork: {reply.removeprefix(FAILED)!r}", passes=True)
        return channel, descriptors[0]

    async def _ensure_started(self) -> None:
        if self.pid is not None:
            return
        self.kill()
        self.starts += 1
        try:
            await self._start()
        except BaseException:
            self.kill()  # its hello may still come, and must not be read as the answer to a request
            raise

    async def _start(self) -> None:
        directory = self._root / f"box-{self.library.name}-{self.starts}"
        directory.mkdir()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, binding = theirs.fileno(), _binding_folder()
        boot = Boot(self.level, self.limits, self._user_ids, self.library, str(directory), control, binding)
        program = _BOOT.format(package=str(_PACKAGE), boot=boot)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # -P: the importing folder must not shadow the snippet's modules
                    [sys.executable, "-s", "-P", "-X", "utf8", "-c", program],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=_environment() | {BIND_NOW: "1"},
                )
        except BlockingIOError as error:  # the process limit of the machine or container is reached
            raise RunFault(f"could not start the template of {self.library.name}: {error}", passes=True) from error
        self._channel = Channel(f"the template of {self.library.name} (pid {self._process.pid})", ours)
        hello = await self._channel.receive(self._start_timeout_s, "to start")
        if hello.startswith(FAILED):
            raise LevelRefused(hello.removeprefix(FAILED).decode(errors="replace"))
        self.missing = json.loads(hello.removeprefix(READY))

    def kill(self) -> None:
        """Kill the process, and with it its workers and their runs. Safe to call at any time."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=BACKSTOP_S)
            self._process = None


class Worker:
    """One slot's process for one tier, forked when needed and replaced when lost."""

    def __init__(self, slot: int, template: Template, root: Path, group: MemoryGroup | None) -> None:
        self.starts = 0
        self._slot, self._template, self._root, self._group = slot, template, root, group
        self._channel: Channel | None = None
        self._handle: int | None = None
        self._running = self._cleaning = False

    @property
    def name(self) -> str:
        return f"worker {self._slot} ({self._template.library.name})"

    @property
    def _directory(self) -> str:
        return str(self._root / f"slot-{self._slot}-{self._template.library.name}-{self.starts}")

    @property
    def pid(self) -> int | None:
        """Its process id, None without a process."""
        if self._handle is None:
            return None
        lines = Path(f"/proc/self/fdinfo/{self._handle}").read_text().splitlines()
        pid = int(next(line.split()[1] for line in lines if line.startswith("Pid:")))
        return pid if pid > 0 else None

    async def ensure_started(self) -> None:
        """Fork the process unless it exists.

        Raises WorkerLost when it is not ready within its deadline, RunFault at a process limit, and LevelRefused when
        it cannot be confined.
        """
        if self._channel is not None:
            return
        self.starts += 1
        self._channel, self._handle = await self._template.spawn(self._slot, self._directory)
        hello = await self._channel.receive(WORKER_START_TIMEOUT_S, "to start")
        if hello != READY:
            raise LevelRefused(f"{self.name} could not confine itself: {hello.removeprefix(FAILED)[:500]!r}")
        if self._group is not None and self.pid is not None:  # its runs inherit the group
            try:
                self._group.enter(self.pid)
            except OSError as error:
                raise WorkerLost(f"{self.name} is in no control group: {error}") from error

    async def run(self, files: Sequence[int], run_timeout_s: float) -> ChildOutcome:
        """Run one execution over `run_files`.

        Raises WorkerLost when the worker fails, LevelRefused when it cannot confine a child, and RunFault when the
        worker is fine but the run failed through no fault of its own.
        """
        assert self._channel is not None
        deadline_s = WALL_FACTOR * run_timeout_s + BACKSTOP_S
        self._running = True
        try:
            self._channel.send(str(run_timeout_s).encode(), files)
            reply = await self._channel.receive(deadline_s, f"to report a run of {run_timeout_s:g} s")
        finally:
            self._running = False
        if reply.startswith(FAILED):
            reason = reply.removeprefix(FAILED).decode(errors="replace")
            raise WorkerLost(f"{self.name} failed over a run: {reason}", raised=True)
        outcome = self._excess_of_memory(ChildOutcome.decode(reply))
        self._cleaning = outcome.cleaning
        if outcome.refused:
            raise LevelRefused(f"{self.name} could not confine a child: {outcome.fault}")
        if outcome.fault is not None:
            killed = outcome.exit_code == -signal.SIGKILL
            raise RunFault(f"{self.name}: {outcome.fault}", passes=outcome.exhausted, over="killed" if killed else "")
        return outcome

    def _excess_of_memory(self, outcome: ChildOutcome) -> ChildOutcome:
        """`outcome`, changed if the kernel killed the run because its group exceeded the memory limit."""
        killed = outcome.fault is not None and outcome.exit_code == -signal.SIGKILL
        if not (killed and self._group is not None and self._group.was_exceeded()):
            return outcome
        return outcome._replace(fault=None, killed_for=f"for more than {self._template.limits.memory_mb} MB of memory")

    def stop(self) -> None:
        """End the current run, if any; the worker stays and reports it as usual."""
        if self._running and self._channel is not None:
            with contextlib.suppress(WorkerLost):  # `run` finds out too
                self._channel.send(STOP, [])

    async def finish(self) -> None:
        """Wait until the files of the last run are removed. Raises WorkerLost when that takes too long."""
        if self._cleaning and self._channel is not None:
            await self._channel.receive(CLEANING_TIMEOUT_S, "to remove the files of a run")
            self._cleaning = False

    def kill(self) -> str:
        """Kill the process and its child, at any time; returns the directory in which its files may remain."""
        self._running = self._cleaning = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):  # it has exited already
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None
        return self._directory
