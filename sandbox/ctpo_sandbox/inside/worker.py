"""The worker of a slot: forks one confined child per run, watches it, and reports its outcome."""

import contextlib
import os
import select
import signal
import socket
import time
from functools import lru_cache, partial

from ctpo_sandbox.inside import substitutes
from ctpo_sandbox.inside.child import SETUP_DONE, RunFiles, become_snippet, entering, prepare_child
from ctpo_sandbox.inside.watch import TIME, Watch, checked
from ctpo_sandbox.isolation import libc
from ctpo_sandbox.isolation.confine import Confinement, WorkDirectory
from ctpo_sandbox.isolation.measure import thread_excess
from ctpo_sandbox.records import CLEANED, MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, READY, STOP, ChildOutcome


class ForkServer:
    """Runs one snippet at a time for the server at the other end of `control`."""

    def __init__(self, control: socket.socket, confinement: Confinement, work: WorkDirectory) -> None:
        self._control = control
        self._confinement = confinement
        self._work = work
        self._watch = Watch(control, self._excess)
        self._setup, report = os.pipe()
        os.set_blocking(self._setup, False)
        self._setup_poll = select.poll()
        self._setup_poll.register(self._setup, select.POLLIN)
        self._outputs: tuple[int, ...] = ()
        self._path = ""
        self._enter: list[libc.Step] = []
        if confinement.filters_calls:
            substitutes.explain_forks()
        prepare = partial(prepare_child, confinement=confinement, report=report)
        self._prepare = lru_cache(maxsize=1)(prepare)

    def serve(self) -> None:
        """Serve requests until the server exits."""
        self._control.send(READY)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                self._serve_one()

    def _serve_one(self) -> None:
        self._work.make()  # in advance, so that no request waits for it
        path = self._work.path
        if path != self._path:
            self._path, self._enter = path, entering(path)
            for name in ("HOME", "TMPDIR", "PWD"):
                libc.set_variable(name, path)
            substitutes.own_directory(path)
        ruleset = self._confinement.ruleset(path)
        files, run_timeout_s = self._next_request()
        try:
            outcome = self._execute(files, ruleset, run_timeout_s)
        except BlockingIOError as error:  # the machine, or the container, has no process left
            outcome = ChildOutcome(False, 0, 0.0, 0.0, 0.0, fault=f"could not fork: {error}", exhausted=True)
        for descriptor in files:
            os.close(descriptor)
        if self._work.discard_quickly():
            self._control.send(outcome.encode())
            return
        self._control.send(outcome._replace(cleaning=True).encode())  # the verdict does not wait for the removal
        self._work.discard()
        self._control.send(CLEANED)

    def _next_request(self) -> tuple[RunFiles, float]:
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, len(RunFiles._fields))
            if not message:
                raise EOFError("the server is gone")
            if message != STOP:  # a STOP for a run that was already over
                return RunFiles(*descriptors), float(message)

    def _execute(self, files: RunFiles, ruleset: int | None, run_timeout_s: float) -> ChildOutcome:
        cpu_limit_s = self._confinement.limits.cpu_limit_s(run_timeout_s)
        prepared = self._prepare(files, ruleset, cpu_limit_s)
        self._outputs = files[1:]
        child = libc.fork()  # safe: a worker, itself a fork, has one thread
        if child == 0:
            become_snippet(prepared, self._enter)
        started = time.monotonic()
        killed_for = ""
        try:
            killed_for = self._watch.wait(child, run_timeout_s)
        finally:
            if not self._confinement.filters_calls:
                _kill_group(child)
            _, status, usage = os.wait4(child, 0)
            wall_s = time.monotonic() - started
        setup = self._setup_report()
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code != -signal.SIGKILL:  # it ended by itself meanwhile
            killed_for = ""
        if not killed_for and (killed_for := checked(self._work.excess_left)):
            exit_code = -signal.SIGKILL  # a program may end before its files are counted
        cpu_s = usage.ru_utime + usage.ru_stime
        cpu_limit_fired = _cpu_limit_fired(exit_code, cpu_s, cpu_limit_s)
        return ChildOutcome(
            timed_out=killed_for == TIME or cpu_limit_fired,
            exit_code=exit_code,
            wall_s=wall_s,
            cpu_s=cpu_s,
            maxrss_mb=usage.ru_maxrss / 1024,
            killed_for="" if killed_for == TIME else killed_for,
            refused=setup not in (SETUP_DONE, b""),
            fault=None if killed_for or cpu_limit_fired else self._fault(setup, exit_code),
        )

    def _setup_report(self) -> bytes:
        """The child's report about its setup; empty when it was killed before."""
        try:
            said = os.read(self._setup, len(SETUP_DONE))
            return said if said == SETUP_DONE else said + os.read(self._setup, MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return b""

    def _excess(self, child: int) -> str:
        if not self._setup_poll.poll(0):  # it is still giving up its rights, and has not run a line
            return ""
        most = None if self._confinement.own_user else self._confinement.limits.threads
        return thread_excess(child, most) or self._work.excess(child, self._outputs)

    def _fault(self, setup: bytes, exit_code: int) -> str | None:
        if setup != SETUP_DONE:
            return setup.decode(errors="replace") or f"the child ended with {exit_code} while it gave up its rights"
        if exit_code == -signal.SIGKILL and self._confinement.filters_calls:
            return (
                "something on this machine killed the run by signal 9; is the machine or the container out of memory?"
            )
        return None


def _kill_group(child: int) -> None:
    """Where no seccomp filter forbids children, they are killed with the snippet, unless they left its group."""
    with contextlib.suppress(ProcessLookupError):  # killed before it created its group
        os.killpg(child, signal.SIGKILL)


def _cpu_limit_fired(exit_code: int, cpu_s: float, cpu_limit_s: float) -> bool:
    """A snippet can send itself the same signals, so the used CPU time must agree."""
    signalled = exit_code in (-signal.SIGXCPU, -signal.SIGKILL)
    return signalled and cpu_s > cpu_limit_s - 0.1
