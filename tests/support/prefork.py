"""Processes that begin with everything imported: a server imports once, then forks for each call.

Importing torch, megatron and transformers costs a process about eight CPU-seconds; a fork of one that has them costs
hundredths. Nothing that runs in a child reaches the server or another child, so no call can see what ran before it.

This file is the main module of all these processes. Processes that they spawn import it again, so it imports little.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from pathlib import Path
from typing import Any

from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("answers", "kernels", "sandbox", "launchers")
"""Folders of packages beside the trainer's."""
PYTHONPATH = os.pathsep.join([str(ROOT), *(str(ROOT / folder) for folder in PACKAGES)])
"""Of a process that imports all that is ours, installed or not."""
SHARED = "CTPO_TEST_PREFORK"
"""Environment variable: the address of a server that several processes share."""
OUTPUT_CHARACTERS = 8000
_START_S = 120.0


@dataclass(frozen=True)
class Start:
    """How a child begins. `argv`: what it sees as its command line; `call`: a pickled (function, arguments).

    path: where it looks for modules before it does where the server does.
    """

    call: bytes
    argv: list[str]
    environment: dict[str, str]
    directory: str
    stdout: str
    stderr: str
    stdin: str = os.devnull
    path: list[str] = field(default_factory=lambda: list(sys.path))


class Child:
    """A process in a group of its own, which ends with it. `pid` is also the number of the group."""

    def __init__(self, address: str, start: Start) -> None:
        self.stdout, self.stderr = Path(start.stdout), Path(start.stderr)
        self._connection = _connected(address)
        self._connection.sendall(pickle.dumps(start))
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())
        self._status: int | None = None

    def fileno(self) -> int:
        """For `select`: readable when the process has ended."""
        return self._connection.fileno()

    def wait(self, timeout_s: float | None) -> int | None:
        """The exit status, negative for a signal; None when it has not ended in time."""
        if self._status is None and connections.wait([self], timeout_s):
            self._status = int(self._answers.readline())
        return self._status

    def end(self) -> None:
        """Kill the process and its group, if it still runs."""
        self._answers.close()
        self._connection.close()


class Client:
    """Starts processes of a server that somebody else keeps running. address: of its socket."""

    def __init__(self, address: str) -> None:
        self.address = address

    def start(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        output: Path,
        argv: Sequence[str] = ("prefork",),
        environment: dict[str, str] | None = None,
        directory: Path = ROOT,
    ) -> Child:
        """Call a function of a module in a new process; its output goes to `output`.out and `output`.err.

        What it returns is the exit status. `environment` replaces that of this process; what is read at import only
        (OMP_NUM_THREADS) is the server's.
        """
        call = pickle.dumps((function, arguments))
        where = [f"{output}.out", f"{output}.err"]
        return Child(self.address, Start(call, [*argv], dict(environment or os.environ), str(directory), *where))

    def run(
        self, function: Callable[..., Any], *arguments: Any, deadline_s: float, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """As `start`, to the end. Raises AssertionError with the output past scaled(deadline_s)."""
        with tempfile.TemporaryDirectory(prefix="prefork-") as folder:
            child = self.start(function, *arguments, output=Path(folder) / "child", **how)
            try:
                status = child.wait(scaled(deadline_s))
            finally:
                child.end()
            out, err = (path.read_text(errors="replace") for path in (child.stdout, child.stderr))
        if status is None:
            said = (out + err)[-OUTPUT_CHARACTERS:]
            raise AssertionError(
                f"{function.__qualname__} had not ended after {scaled(deadline_s):g} s; it said:\n{said}"
            )
        return subprocess.CompletedProcess([function.__qualname__, *map(str, arguments)], status, out, err)


class Prefork(Client):
    """The server, for as long as this object is open. Its first child waits until everything is imported."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prefork-")
        super().__init__(f"{self._folder.name}/socket")
        paths = os.pathsep.join(dict.fromkeys(filter(None, [str(ROOT), *sys.path])))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.prefork", self.address, *modules],
            stdin=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            cwd=ROOT,
            start_new_session=True,
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(scaled(10))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._folder.cleanup()


def _connected(address: str) -> socket.socket:
    """A connection to a server, which may still be importing. Raises AssertionError when it does not start."""
    end = time.monotonic() + scaled(_START_S)
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            assert time.monotonic() < end, f"no server of test processes after {scaled(_START_S):g} s; see above"
            time.sleep(0.1)


def _serve(address: str, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise copy every page of these
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:  # the other end of stdin is closed
            _await_children()
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection)
            os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _await_children() -> None:
    """For a while, so that whoever measures this server's CPU time sees theirs."""
    signal.alarm(5)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _keep(connection: socket.socket) -> None:
    """Start the child and end its group when it ends, or when nobody waits for it any more."""
    start: Start = pickle.load(connection.makefile("rb", buffering=0))
    child = os.fork()
    if child == 0:
        connection.close()
        _end(_become(start))
    with contextlib.suppress(PermissionError):  # the child has done so itself, and more
        os.setpgid(child, child)
    connection.sendall(b"%d\n" % child)
    select.select([connection, os.pidfd_open(child)], [], [])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # before its status is read: until then nobody else has its number
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % status)


def _become(start: Start) -> int | None:
    os.setpgid(0, 0)
    for number, (path, flags) in enumerate(
        ((start.stdin, os.O_RDONLY), *((path, os.O_WRONLY | os.O_CREAT) for path in (start.stdout, start.stderr)))
    ):
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(start.directory)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.argv = start.argv
    sys.path[:] = dict.fromkeys([*start.path, *sys.path])
    function, arguments = pickle.loads(start.call)
    try:
        return function(*arguments)
    except SystemExit as asked:
        return asked.code
    except BaseException:
        traceback.print_exc()
        return 1


def _end(status: int | None) -> None:
    """As the interpreter does, but for taking the imported modules apart: most of their pages are the server's."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
