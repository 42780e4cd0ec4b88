"""The slots of a server: worker processes, the queue in front of them, and the replacement of lost ones."""

import asyncio
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ctpo_sandbox.records import MAX_MESSAGE_BYTES, READY, Limits, Outcome
from ctpo_sandbox.worker import remove_tree

WORKER_START_TIMEOUT_S = 30.0
BACKSTOP_S = 10.0
REPLY_LIMIT_BYTES = 1_000_000
_ATTEMPTS = 2
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
# -P: the importing folder must not shadow the snippet's modules; the root is appended only for the import of ours.
_BOOT = "import sys; sys.path.append({root!r}); from ctpo_sandbox.worker import main; main({configuration!r})"
_log = logging.getLogger("ctpo_sandbox.pool")


class WorkerLost(Exception):
    """A worker died, hung, or could not confine its child: no statement about the snippet."""


class PoolUnavailable(Exception):
    """A run could not be carried out on a fresh worker either."""


@dataclass(frozen=True)
class Run:
    """A finished run: how the child ended, its decoded and possibly cut output, and the seconds it queued."""

    outcome: Outcome
    stdout: str
    stderr: str
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


def _read_output(descriptor: int, limit: int = REPLY_LIMIT_BYTES) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, limit, 0).decode("utf-8", errors="replace")
    return text if size <= limit else f"{text}\n[output cut: the first {limit} of {size} bytes]\n"


class Worker:
    """One slot: a fork server process, started when needed and replaced when lost."""

    def __init__(self, name: str, directory: Path, limits: Limits) -> None:
        self.name = name
        self.missing: dict[str, str] = {}
        self.starts = 0
        self._root = directory
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    @property
    def _directory(self) -> str:
        return str(self._root / f"{self.name}-{self.starts}")

    async def ensure_started(self) -> None:
        """Start the process unless it runs. Raises WorkerLost when it is not ready within its deadline."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        if self.starts:
            await asyncio.to_thread(remove_tree, self._directory)
        self.starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        configuration = {
            "limits": asdict(self._limits),
            "directory": self._directory,
            "control_fd": theirs.fileno(),
            "package_root": _PACKAGE_ROOT,
        }
        boot = _BOOT.format(root=_PACKAGE_ROOT, configuration=json.dumps(configuration))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-X", "utf8", "-c", boot],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )
        self._control = ours
        hello = await self._receive(WORKER_START_TIMEOUT_S, "to start")
        if not hello.startswith(READY):
            raise WorkerLost(f"{self.name} sent {hello[:80]!r} instead of its greeting")
        self.missing = json.loads(hello.removeprefix(READY))

    async def run(self, code: bytes, stdin: bytes, run_timeout_s: float) -> tuple[Outcome, str, str]:
        """One execution: outcome, stdout, stderr. Raises WorkerLost, never a verdict, when the worker fails."""
        assert self._control is not None
        with _memory_files(code, stdin, b"", b"") as descriptors:
            for output in descriptors[2:]:
                _append_only(output)
            request = json.dumps({"run_timeout_s": run_timeout_s}).encode()
            try:
                socket.send_fds(self._control, [request], descriptors)
            except OSError as error:
                raise WorkerLost(f"{self.name} did not take a request: {error}") from error
            reply = await self._receive(run_timeout_s + BACKSTOP_S, f"to report a run of {run_timeout_s:g} s")
            outcome = Outcome.decode(reply)
            if outcome.setup_error is not None:
                raise WorkerLost(f"{self.name} could not confine a child: {outcome.setup_error}")
            return outcome, *(_read_output(output) for output in descriptors[2:])

    async def _receive(self, timeout_s: float, purpose: str) -> bytes:
        assert self._control is not None
        receive = asyncio.get_running_loop().sock_recv(self._control, MAX_MESSAGE_BYTES)
        try:
            message = await asyncio.wait_for(receive, timeout_s)
        except TimeoutError:
            raise WorkerLost(f"waited {timeout_s:g} s for {self.name} (pid {self.pid}) {purpose}") from None
        except OSError as error:
            raise WorkerLost(f"the connection to {self.name} (pid {self.pid}) broke: {error}") from error
        if not message:
            raise WorkerLost(f"{self.name} (pid {self.pid}) died instead of being there {purpose}")
        return message

    def kill(self) -> None:
        """End the process; its child dies with it. Safe to call at any time."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=BACKSTOP_S)
            self._process = None


class Pool:
    """`slots` workers behind one first-come queue."""

    def __init__(self, *, slots: int, limits: Limits) -> None:
        self.executions = 0
        self._root = Path(tempfile.mkdtemp(prefix="ctpo-sandbox-"))
        self.workers = [Worker(f"worker-{index}", self._root, limits) for index in range(slots)]
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()

    @property
    def restarts(self) -> int:
        """Workers replaced since the start."""
        return sum(max(0, worker.starts - 1) for worker in self.workers)

    @property
    def idle(self) -> int:
        return self._idle.qsize()

    @property
    def missing(self) -> dict[str, str]:
        """Protections that this machine does not offer, with the reason."""
        return self.workers[0].missing

    async def start(self) -> None:
        """Start every worker. Raises WorkerLost when one does not come up."""
        await asyncio.gather(*(worker.ensure_started() for worker in self.workers))
        for worker in self.workers:
            self._idle.put_nowait(worker)

    async def run(self, code: bytes, stdin: bytes, run_timeout_s: float) -> Run:
        """Execute one snippet; the queue has no deadline of its own, the caller's request has.

        Raises PoolUnavailable when two workers in a row were lost over it. Cancelling kills the snippet.
        """
        queued = time.monotonic()
        worker = await self._idle.get()
        queue_s = time.monotonic() - queued
        try:
            outcome, stdout, stderr = await self._run_with_retry(worker, code, stdin, run_timeout_s)
        except asyncio.CancelledError:
            worker.kill()
            raise
        finally:
            self._idle.put_nowait(worker)
        self.executions += 1
        return Run(outcome, stdout, stderr, queue_s)

    async def _run_with_retry(
        self, worker: Worker, code: bytes, stdin: bytes, run_timeout_s: float
    ) -> tuple[Outcome, str, str]:
        reasons = []
        for _ in range(_ATTEMPTS):
            try:
                await worker.ensure_started()
                return await worker.run(code, stdin, run_timeout_s)
            except WorkerLost as error:
                _log.error("replacing %s: %s", worker.name, error)
                reasons.append(str(error))
                worker.kill()
        raise PoolUnavailable("; then ".join(reasons))

    def close(self) -> None:
        """Kill every worker and remove every work directory."""
        for worker in self.workers:
            worker.kill()
        remove_tree(str(self._root))
