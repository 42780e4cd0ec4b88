"""The fork server of the worker processes; it shares no threads or devices with the caller."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from pebble import CONSTS

from ctpo_megatron.base.stop import children_spared
from ctpo_sandbox.isolation.libc import die_with_parent

_ALWAYS = ["__main__", "ctpo_megatron.rewards.pool", "ctpo_megatron.data.trajectory"]


def fork_server(*, math: bool) -> BaseContext:
    """Start the fork server and return its context. A process has one; the first call decides what it imports.

    The server imports a module once for all workers, so replacing a killed worker takes milliseconds. math: also import
    what compares answers.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_ALWAYS, *(["math_verify", "ctpo_answers"] if math else [])])
    # Also the server that replaces a killed one, as multiprocessing starts the next process.
    forkserver._forkserver.ensure_running = _ensure_spared  # type: ignore[method-assign]
    _ensure_spared()
    CONSTS.term_timeout = 0.0  # how long pebble waits after SIGTERM before it kills
    return context


def _ensure_spared() -> None:
    """Start the fork server unless it runs, spared of the signals that ask a run to end."""
    with children_spared():
        forkserver.ensure_running()


def end_with_trainer() -> None:
    """For a worker: end when the fork server does, even in the middle of a function that hangs.

    That ends when no process holds its pipe any more. Workers get the pipe, too, so this one lets go of it.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.close(null)
    die_with_parent(os.getppid(), signal.SIGKILL)
