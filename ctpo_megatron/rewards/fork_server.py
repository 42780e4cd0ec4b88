"""The fork server that worker processes of this package come from: it shares no threads or devices with the caller."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from pebble import CONSTS

from ctpo_megatron.base.signals import children_spared

_ALWAYS = ["__main__", "ctpo_megatron.rewards.pool", "ctpo_megatron.data.batch"]


def fork_server(*, math: bool) -> BaseContext:
    """The context of the fork server, which runs afterwards. A process has one; the first call says what it imports.

    Imported once by the server, a module costs its workers nothing, so replacing a killed one takes milliseconds.
    math: import math-verify, too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_ALWAYS, *(["math_verify"] if math else [])])
    with children_spared():
        forkserver.ensure_running()
    CONSTS.term_timeout = 0.0  # how long pebble waits for SIGTERM to act before it kills
    return context
