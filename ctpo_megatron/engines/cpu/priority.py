"""Priority of the trainer where it shares the cores of a machine with engines."""

from __future__ import annotations

import os
import sys
import threading

BEHIND_ENGINES = 5
"""Niceness of the trainer's main thread while engines on its machine sample ahead."""


def give_way_to_engines() -> None:
    """Lower the priority of the calling thread permanently, so that engines on this machine run first.

    Threads that serve the engines keep theirs. A step takes as long as its slower side, which on a CPU is the engine:
    its core has one thread, and competes with programs of tools and with scorers. Does nothing on other systems than
    Linux, where threads have no niceness of their own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, BEHIND_ENGINES))
