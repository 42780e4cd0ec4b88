"""Who goes first where trainer and engines share the cores of a machine."""

from __future__ import annotations

import os
import sys
import threading

BEHIND_ENGINES = 5
"""Niceness of the trainer's main thread while engines beside it sample ahead."""


def give_way_to_engines() -> None:
    """Let engines on this machine's cores come before the calling thread, for good; the threads that serve them stay.

    A step is over when the slower of the two sides is, and on a CPU that is the engine: its core has one thread, and
    programs of tools and scorers beside it. Nothing elsewhere than on Linux: threads have no niceness of their own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, BEHIND_ENGINES))
