"""Signals to processes as soon as they are there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil


def with_word(processes: Iterable[psutil.Process], word: str) -> list[psutil.Process]:
    """Those whose command line holds a word; what ends meanwhile is left out."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found


@contextmanager
def signalled_as_they_start(
    find: Callable[[], Sequence[psutil.Process]], count: int, number: int = signal.SIGKILL
) -> Iterator[None]:
    """Sends a signal to so many processes that `find` did not find before, to each as soon as it is there."""
    seen, over = {process.pid for process in find()}, threading.Event()

    def send() -> None:
        left = count
        while left and not over.is_set():
            for process in find():
                if left and process.pid not in seen:
                    seen.add(process.pid)
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                        left -= 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
