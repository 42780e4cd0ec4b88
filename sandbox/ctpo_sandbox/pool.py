"""The slots of a server: templates, the workers they fork, the queue in front, and the replacement of what is lost."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ctpo_sandbox.libraries import Library, choose
from ctpo_sandbox.records import FAILED, MAX_MESSAGE_BYTES, READY, Limits, Outcome
from ctpo_sandbox.remove import remove_tree
from ctpo_sandbox.template import Boot

TEMPLATE_START_TIMEOUT_S = 60.0
WORKER_START_TIMEOUT_S = 15.0
BACKSTOP_S = 10.0
_ATTEMPTS = 2
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
# -P: the importing folder must not shadow the snippet's modules; the root is appended only for the import of ours.
_BOOT = "import sys; sys.path.append({root!r}); from ctpo_sandbox.template import main; main({configuration!r})"
_log = logging.getLogger("ctpo_sandbox.pool")


class WorkerLost(Exception):
    """A template or worker died, hung, or could not confine its child: no statement about the snippet."""


class LevelRefused(Exception):
    """A template could not be confined at the level asked for."""


class PoolUnavailable(Exception):
    """A run could not be carried out on a fresh worker either."""


@dataclass(frozen=True)
class Run:
    """A finished run: how the child ended, its decoded output, whether that was cut, and the seconds it queued."""

    outcome: Outcome
    stdout: str
    stderr: str
    truncated: bool
    queue_s: float


def _environment() -> dict[str, str]:
    """The environment every snippet sees: nothing of the trainer's, one thread per numerical library."""
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


@contextmanager
def _memory_files(*contents: bytes) -> Iterator[list[int]]:
    descriptors: list[int] = []
    try:
        for content in contents:
            descriptors.append(os.memfd_create("ctpo-sandbox", os.MFD_CLOEXEC))
            view = memoryview(content)
            while view:
                view = view[os.pwrite(descriptors[-1], view, len(content) - len(view)) :]
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _append_only(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)


def _read_output(descriptor: int, limit: int) -> tuple[str, bool]:
    """The text, and whether it was cut."""
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, limit, 0).decode("utf-8", errors="replace")
    if size <= limit:
        return text, False
    return f"{text}\n[output cut: the first {limit} of {size} bytes]\n", True


class _Channel:
    """Our end of a socket to a process, read with deadlines."""

    def __init__(self, name: str, control: socket.socket) -> None:
        self.name = name
        self._control = control
        control.setblocking(False)

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Raises WorkerLost."""
        try:
            socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise WorkerLost(f"{self.name} did not take a request: {error}") from error

    async def receive(self, timeout_s: float, purpose: str) -> bytes:
        """The next message. Raises WorkerLost when none comes in time, or ever."""
        return (await self.receive_descriptor(timeout_s, purpose))[0]

    async def receive_descriptor(self, timeout_s: float, purpose: str) -> tuple[bytes, list[int]]:
        """The next message and the descriptors that came with it."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        descriptor = self._control.fileno()  # kept, because the socket may be closed meanwhile
        loop.add_reader(descriptor, lambda: None if readable.done() else readable.set_result(None))
        try:
            await asyncio.wait_for(readable, timeout_s)
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        except TimeoutError:
            raise WorkerLost(f"waited {timeout_s:g} s for {self.name} {purpose}") from None
        except OSError as error:
            raise WorkerLost(f"the connection to {self.name} broke: {error}") from error
        finally:
            loop.remove_reader(descriptor)
        if not message:
            raise WorkerLost(f"{self.name} died instead of being there {purpose}")
        return message, descriptors

    def close(self) -> None:
        self._control.close()


class Template:
    """A process with one tier of libraries imported, from which workers are forked; replaced when lost."""

    def __init__(self, library: Library, level: str, limits: Limits, root: Path) -> None:
        self.library, self.level, self.limits = library, level, limits
        self.missing: dict[str, str] = {}
        self.starts = 0
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: _Channel | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def spawn(self, slot: int, directory: str) -> "tuple[_Channel, int]":
        """A new worker: its channel and a pidfd. Raises WorkerLost, or LevelRefused at the first start."""
        async with self._one_at_a_time:
            await self._ensure_started()
            assert self._channel is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel = _Channel(f"worker {slot} ({self.library.name})", ours)
            try:
                with theirs:
                    request = {"slot": slot, "directory": directory}
                    self._channel.send(json.dumps(request).encode(), [theirs.fileno()])
                _, descriptors = await self._channel.receive_descriptor(WORKER_START_TIMEOUT_S, "to fork a worker")
            except BaseException:
                channel.close()
                self.kill()
                raise
        return channel, descriptors[0]

    async def _ensure_started(self) -> None:
        if self.pid is not None:
            return
        self.kill()
        self.starts += 1
        directory = self._root / f"box-{self.library.name}-{self.starts}"
        directory.mkdir()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = Boot(self.level, self.limits, self.library, str(directory), theirs.fileno(), _PACKAGE_ROOT)
        program = _BOOT.format(root=_PACKAGE_ROOT, configuration=boot.encode())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-X", "utf8", "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )
        self._channel = _Channel(f"the template of {self.library.name} (pid {self._process.pid})", ours)
        hello = await self._channel.receive(TEMPLATE_START_TIMEOUT_S, "to start")
        if hello.startswith(FAILED):
            self.kill()
            raise LevelRefused(hello.removeprefix(FAILED).decode(errors="replace"))
        self.missing = json.loads(hello.removeprefix(READY))

    def kill(self) -> None:
        """End the process, and with it its workers and their runs. Safe to call at any time."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=BACKSTOP_S)
            self._process = None


class Worker:
    """One slot's process for one tier, forked when needed and replaced when lost."""

    def __init__(self, slot: int, template: Template, root: Path) -> None:
        self.starts = 0
        self._slot, self._template, self._root = slot, template, root
        self._channel: _Channel | None = None
        self._handle: int | None = None

    @property
    def name(self) -> str:
        return f"worker {self._slot} ({self._template.library.name})"

    @property
    def _directory(self) -> str:
        return str(self._root / f"slot-{self._slot}-{self._template.library.name}-{self.starts}")

    @property
    def pid(self) -> int | None:
        """Its process id, None while there is no process."""
        if self._handle is None:
            return None
        lines = Path(f"/proc/self/fdinfo/{self._handle}").read_text().splitlines()
        pid = int(next(line.split()[1] for line in lines if line.startswith("Pid:")))
        return pid if pid > 0 else None

    async def ensure_started(self) -> None:
        """Fork the process unless it is there. Raises WorkerLost when it is not ready within its deadline."""
        if self._channel is not None:
            return
        if self.starts:  # a killed one may have left its directory
            await asyncio.to_thread(remove_tree, self._directory)
        self.starts += 1
        self._channel, self._handle = await self._template.spawn(self._slot, self._directory)
        hello = await self._channel.receive(WORKER_START_TIMEOUT_S, "to start")
        if hello != READY:
            raise WorkerLost(f"{self.name} could not confine itself: {hello.removeprefix(FAILED)[:500]!r}")

    async def run(self, code: bytes, stdin: bytes, run_timeout_s: float) -> tuple[Outcome, str, str, bool]:
        """One execution: outcome, stdout, stderr, cut. Raises WorkerLost, never a verdict, when the worker fails."""
        assert self._channel is not None
        with _memory_files(code, stdin, b"", b"") as descriptors:
            for output in descriptors[2:]:
                _append_only(output)
            self._channel.send(json.dumps({"run_timeout_s": run_timeout_s}).encode(), descriptors)
            reply = await self._channel.receive(run_timeout_s + BACKSTOP_S, f"to report a run of {run_timeout_s:g} s")
            outcome = Outcome.decode(reply)
            if outcome.setup_error is not None:
                raise WorkerLost(f"{self.name} could not confine a child: {outcome.setup_error}")
            limit = self._template.limits.output_kb * 1000
            (stdout, cut), (stderr, also_cut) = (_read_output(output, limit) for output in descriptors[2:])
            return outcome, stdout, stderr, cut or also_cut

    def kill(self) -> None:
        """End the process; its child dies with it. Safe to call at any time."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None


class Pool:
    """`slots` places behind one first-come queue; each has a worker of every library tier, forked at its first use."""

    def __init__(self, *, slots: int, limits: Limits, level: str, libraries: Sequence[Library]) -> None:
        self.level, self.limits = level, limits
        self.lost = 0
        """Attempts that ended with the loss of a template or worker."""

        self._libraries = tuple(libraries)
        self._root = Path(tempfile.mkdtemp(prefix="ctpo-sandbox-"))
        self._root.chmod(0o711)  # runs of other users have their directories below
        self.templates = {tier.name: Template(tier, level, limits, self._root) for tier in libraries}
        self._slots = [
            {name: Worker(slot, template, self._root) for name, template in self.templates.items()}
            for slot in range(slots)
        ]
        self._idle: asyncio.Queue[dict[str, Worker]] = asyncio.Queue()
        self.waiting = 0

    @property
    def directory(self) -> str:
        """The server's own directory."""
        return str(self._root)

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def workers(self) -> list[Worker]:
        return [worker for slot in self._slots for worker in slot.values()]

    @property
    def _parts(self) -> list[Worker | Template]:
        return [*self.workers, *self.templates.values()]

    @property
    def restarts(self) -> int:
        """Templates and workers replaced since the start."""
        return sum(max(0, part.starts - 1) for part in self._parts)

    @property
    def idle(self) -> int:
        return self._idle.qsize()

    @property
    def missing(self) -> dict[str, str]:
        """Protections that this machine does not offer at this level, with the reason."""
        return next(iter(self.templates.values())).missing

    async def start(self) -> None:
        """Start every template and a worker of each. Raises LevelRefused, or WorkerLost when one does not come up."""
        started = (worker.ensure_started() for worker in self._slots[0].values())
        problems = [found for found in await asyncio.gather(*started, return_exceptions=True) if found is not None]
        if problems:
            raise problems[0]
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def run(self, code: str, stdin: str, run_timeout_s: float) -> Run:
        """Execute one snippet; the queue has no deadline of its own, the caller's request has.

        Raises PoolUnavailable when two workers in a row were lost over it. Cancelling kills the snippet.
        """
        queued = time.monotonic()
        self.waiting += 1
        try:
            slot = await self._idle.get()
        finally:
            self.waiting -= 1
        queue_s = time.monotonic() - queued
        worker = slot[choose(code, self._libraries)]
        source, given = (text.encode("utf-8", errors="surrogatepass") for text in (code, stdin))
        try:
            found = await self._run_with_retry(worker, source, given, run_timeout_s)
        except asyncio.CancelledError:
            worker.kill()
            raise
        finally:
            self._idle.put_nowait(slot)
        return Run(*found, queue_s)

    async def _run_with_retry(
        self, worker: Worker, code: bytes, stdin: bytes, run_timeout_s: float
    ) -> tuple[Outcome, str, str, bool]:
        reasons = []
        for _ in range(_ATTEMPTS):
            try:
                await worker.ensure_started()
                return await worker.run(code, stdin, run_timeout_s)
            except (WorkerLost, LevelRefused) as error:
                _log.error("replacing %s: %s", worker.name, error)
                self.lost += 1
                reasons.append(str(error))
                worker.kill()
        raise PoolUnavailable("; then ".join(reasons))

    def close(self) -> None:
        """Kill every process and remove every work directory."""
        for part in self._parts:
            part.kill()
        remove_tree(str(self._root))
