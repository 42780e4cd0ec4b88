"""The template: a clean interpreter in its box with a tier of preloaded libraries; workers are its forks.

It never runs a snippet, so a worker can be replaced within a millisecond by an equally clean one.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_sandbox.inside import substitutes
from ctpo_sandbox.inside.child import rehearse
from ctpo_sandbox.inside.libraries import Library, load
from ctpo_sandbox.inside.program import prepare_main
from ctpo_sandbox.inside.worker import ForkServer
from ctpo_sandbox.isolation import libc, namespaces
from ctpo_sandbox.isolation.confine import Confinement
from ctpo_sandbox.isolation.readable import readable_trees
from ctpo_sandbox.records import FAILED, MAX_MESSAGE_BYTES, READY, Limits

BIND_NOW = "LD_BIND_NOW"
"""Environment variable of a template: resolve symbols at start instead of in every run."""


@dataclass(frozen=True)
class Boot:
    """Start parameters of a template, which get there as the text of `repr`.

    user_ids: of the slots. directory: empty, its own. control: descriptor. binding: see `filters.compiled`.
    """

    level: str
    limits: Limits
    user_ids: tuple[int, ...]
    library: Library
    directory: str
    control: int
    binding: str | None


def main(boot: Boot) -> None:
    """Entry point of the process. Returns when the server is gone."""
    del os.environ[BIND_NOW]  # must not reach the runs
    _forget_inherited_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    control = socket.socket(fileno=boot.control)
    control.set_inheritable(False)
    try:
        confinement = _prepare(boot)
    except ImportError as error:
        places = ", ".join(path for path in readable_trees() if Path(path).is_relative_to(sys.prefix))
        reason = f"{error}: snippets see packages below {places} only, and it is installed elsewhere"
        control.send(FAILED + reason.encode())
        return
    except OSError as error:
        control.send(FAILED + str(error).encode())
        return
    _serve(control, confinement)
    if not boot.level.startswith("namespaces"):  # there the process outside the box removes it
        _leave(boot.directory)


def _forget_inherited_signals() -> None:
    """What `nohup`, a shell's `&` or a thread has ignored or blocked must not change how a run ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python itself ignores these
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _leave(directory: str) -> None:
    """A killed server cannot remove its directory; the last of its templates does."""
    signal.alarm(10)  # the default action ends this process, should a worker not exit
    with contextlib.suppress(ChildProcessError):  # with SIGCHLD ignored, wait returns when all workers have exited
        os.wait()
    with contextlib.suppress(OSError):  # not empty: another template is still there
        os.rmdir(directory)
        os.rmdir(os.path.dirname(directory))


def _prepare(boot: Boot) -> Confinement:
    confinement = Confinement(boot.level, boot.limits, boot.user_ids, boot.binding)
    if boot.level.startswith("namespaces"):
        namespaces.enter(boot.directory, user=boot.level == "namespaces-user", leave=lambda: _leave(boot.directory))
    load(boot.library)
    libc.set_thread_stack(boot.limits.thread_stack_kb << 10)
    confinement.open_files()
    libc.hide()
    prepare_main()
    if confinement.filters_calls:
        substitutes.serve_multiprocessing()
    if not confinement.file_attributes:
        substitutes.tolerate_attributes()
    rehearse(confinement)
    gc.collect()
    gc.freeze()
    return confinement


def _serve(control: socket.socket, confinement: Confinement) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses of workers are not used
    control.send(READY + json.dumps(confinement.missing).encode())
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        except ConnectionResetError:  # the server was killed before it read our message
            return
        if not message:
            return
        template = 0 if confinement.boxed else os.getpid()  # as seen by a worker in its own pid namespace
        try:
            worker = namespaces.fork() if confinement.boxed else os.fork()
        except BlockingIOError as error:  # the machine, or the container, has no process left
            os.close(descriptors[0])
            control.send(FAILED + str(error).encode())
            continue
        if worker == 0:
            control.close()
            _become_worker(descriptors[0], confinement, json.loads(message), template)
        os.close(descriptors[0])
        handle = os.pidfd_open(worker)
        socket.send_fds(control, [b"worker"], [handle])
        os.close(handle)


def _become_worker(descriptor: int, confinement: Confinement, request: dict[str, Any], template: int) -> None:
    status = 1
    server = socket.socket(fileno=descriptor)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # one session for all runs: the kernel creates a scheduler group for each session
        libc.die_with_parent(template, signal.SIGKILL)
        try:
            work = confinement.enter_worker(request["slot"], request["directory"])
        except OSError as error:
            server.send(FAILED + str(error).encode())
            os._exit(1)
        try:
            ForkServer(server, confinement, work).serve()
        finally:
            work.close()
        status = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the server is gone
            server.send(FAILED + f"{type(error).__name__}: {error}".encode(errors="replace")[: MAX_MESSAGE_BYTES // 2])
        raise
    finally:
        os._exit(status)
