"""The context in which a process that has imported `preload` first takes its CPU for a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tests.rehearsal.answers import Requests
from tests.rehearsal.rules import Rules
from tests.support.backends import use_backend


class _Thread(threading.local):
    pretends = False


_thread = _Thread()


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Tensors claim devices, and CUDA's rules hold for them; both modes are of this thread. May nest."""
    if _thread.pretends:
        yield
        return
    _thread.pretends = True
    try:
        with use_backend("torch"), Rules(), Requests():
            yield
    finally:
        _thread.pretends = False
