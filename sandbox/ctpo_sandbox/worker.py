"""The worker of a slot: forks one confined child per run, waits for it or kills it, and says how it ended."""

import contextlib
import json
import os
import select
import signal
import socket
import time

from ctpo_sandbox.child import SETUP_DONE, Files, become_snippet
from ctpo_sandbox.confine import Confinement, WorkDirectories
from ctpo_sandbox.records import MAX_MESSAGE_BYTES, READY, Outcome


class ServerGone(Exception):
    """The server closed its end of the control socket."""


class ForkServer:
    """Runs one snippet at a time for the server at the other end of `control`."""

    def __init__(self, control: socket.socket, confinement: Confinement, work: WorkDirectories) -> None:
        self._control = control
        self._confinement = confinement
        self._work = work

    def serve(self) -> None:
        """Answer requests until the server goes away."""
        self._control.send(READY)
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(
                    self._control, MAX_MESSAGE_BYTES, len(Files.__annotations__)
                )
                if not message:
                    return
                with self._work.fresh() as directory:
                    outcome = self._execute(Files(*descriptors), directory, json.loads(message)["run_timeout_s"])
                for descriptor in descriptors:
                    os.close(descriptor)
                self._control.send(outcome.encode())
            except (ServerGone, BrokenPipeError, ConnectionResetError):
                return

    def _execute(self, files: Files, directory: str, run_timeout_s: float) -> Outcome:
        setup_read, setup_write = os.pipe()
        worker = os.getpid()
        child = os.fork()
        if child == 0:
            become_snippet(
                files,
                directory=directory,
                setup_pipe=setup_write,
                confinement=self._confinement,
                run_timeout_s=run_timeout_s,
                worker=worker,
            )
        started = time.monotonic()
        os.close(setup_write)
        try:
            killed = self._wait_or_kill(child, started + run_timeout_s)
        finally:
            _kill_group(child)
            _, status, usage = os.wait4(child, 0)
            wall_s = time.monotonic() - started
        setup = os.read(setup_read, MAX_MESSAGE_BYTES)
        os.close(setup_read)
        cpu_s = usage.ru_utime + usage.ru_stime
        exit_code = os.waitstatus_to_exitcode(status)
        wall_limit_fired = killed and exit_code == -signal.SIGKILL
        cpu_limit_s = self._confinement.limits.cpu_limit_s(run_timeout_s)
        return Outcome(
            timed_out=wall_limit_fired or _cpu_limit_fired(exit_code, cpu_s, cpu_limit_s),
            exit_code=exit_code,
            wall_s=wall_s,
            cpu_s=cpu_s,
            maxrss_mb=usage.ru_maxrss / 1024,
            setup_error=None if wall_limit_fired or setup == SETUP_DONE else _setup_error(setup, exit_code),
        )

    def _wait_or_kill(self, child: int, deadline: float) -> bool:
        """Wait for the end of `child`; True when the deadline came first. The child is dead or dying afterwards."""
        pidfd = os.pidfd_open(child)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self._control, 0)
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if pidfd in ready:
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if ready:
                raise ServerGone
            return True
        finally:
            os.close(pidfd)


def _kill_group(child: int) -> None:
    """Where no seccomp filter forbids them, a snippet's own children end with it, unless they left its session."""
    with contextlib.suppress(ProcessLookupError):  # killed before it made its session
        os.killpg(child, signal.SIGKILL)


def _setup_error(message: bytes, exit_code: int) -> str:
    return message.decode(errors="replace") or f"the child ended with {exit_code} while it gave up its rights"


def _cpu_limit_fired(exit_code: int, cpu_s: float, cpu_limit_s: float) -> bool:
    """A snippet can send itself the same signals, so the CPU time used has to agree."""
    signalled = exit_code in (-signal.SIGXCPU, -signal.SIGKILL)
    return signalled and cpu_s > cpu_limit_s - 0.1
