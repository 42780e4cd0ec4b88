"""Replaces functions that the kernel does not carry out for a run, so that usual programs work.

None has a right that its run has not: they only answer differently where the kernel refuses.
"""

import errno
import functools
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

_RECURSIVE = 0  # the kind of multiprocessing's RLock
_NO_PROCESSES = "one process per run: use threads, as concurrent.futures.ThreadPoolExecutor does"
_MODES_AND_DATES = ("chmod", "fchmod", "utime")
_multiprocessing: Any = importlib.import_module("_multiprocessing")
_own_directory = ""


def no_fork() -> NoReturn:
    """Instead of os.fork. Raises PermissionError."""
    raise PermissionError(errno.EPERM, _NO_PROCESSES)


class SemLock:
    """Instead of `_multiprocessing.SemLock`, whose named semaphores are files of the machine: among threads.

    Thread pools and queues of multiprocessing need it, and processes there are none.
    """

    SEM_VALUE_MAX: int = _multiprocessing.SemLock.SEM_VALUE_MAX

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> None:
        self.kind, self.maxvalue = kind, maxvalue
        self.handle, self.name = 0, None
        self._free = threading.Semaphore(value)
        self._holder = self._held = 0

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """As a Lock, RLock or Semaphore of multiprocessing; `timeout` in seconds."""
        if self.kind == _RECURSIVE and self._is_mine():
            self._held += 1
            return True
        limit_s = None if timeout is None or not block else max(0.0, timeout)
        if not self._free.acquire(block, limit_s):
            return False
        self._held += 1
        self._holder = threading.get_ident()
        return True

    def release(self) -> None:
        """Raises AssertionError for an RLock of another thread, ValueError beyond the first value."""
        if self.kind == _RECURSIVE:
            if not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            if self._held > 1:
                self._held -= 1
                return
        elif self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        self._held -= 1
        self._free.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_mine(self) -> bool:
        return self._held > 0 and self._holder == threading.get_ident()

    def _count(self) -> int:
        return self._held

    def _get_value(self) -> int:
        return self._free._value

    def _is_zero(self) -> bool:
        return self._get_value() == 0

    def _after_fork(self) -> None:
        """No process is forked."""


def serve_multiprocessing() -> None:
    """Have locks and shared values of multiprocessing work, among threads."""
    _multiprocessing.SemLock = SemLock
    setattr(os, "statvfs", _without_shared_memory(os.statvfs))  # noqa: B010  # mypy knows it as a function


def _without_shared_memory(call: Callable[[Any], os.statvfs_result]) -> Callable[[Any], os.statvfs_result]:
    """A run has no /dev/shm. `multiprocessing` takes a temporary directory where too little is free there."""

    @functools.wraps(call)
    def statvfs(path: Any) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, *[0] * 7, 255)) if path == "/dev/shm" else call(path)

    return statvfs


def explain_forks() -> None:
    """Have os.fork fail with the reason."""
    os.fork = no_fork


def tolerate_attributes() -> None:
    """Let changes of modes and dates do nothing where the kernel refuses them; truncate by opening."""
    for name in _MODES_AND_DATES:
        _replace(name, _without_effect(getattr(os, name)))
    _replace("truncate", _opening(os.truncate))


def own_directory(path: str) -> None:
    """Below it are the files of the next run."""
    global _own_directory
    _own_directory = path


def _replace(name: str, function: Callable[..., None]) -> None:
    original = getattr(os, name)
    for features in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if original in features:
            features.add(function)
    setattr(os, name, function)


def _without_effect(call: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(call)
    def changed(*arguments: Any, **options: Any) -> None:
        try:
            return call(*arguments, **options)
        except PermissionError as error:
            refused = error
        path: Any = arguments[0] if arguments else options.get("path", options.get("fd"))
        where = {name: options[name] for name in ("dir_fd", "follow_symlinks") if name in options}
        os.stat(path, **where)  # what is not there is an error
        if not _is_own(path, **where):
            raise refused

    return changed


def _opening(call: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(call)
    def truncated(path: Any, length: int) -> None:
        if isinstance(path, int):
            return call(path, length)
        descriptor = os.open(path, os.O_WRONLY)  # which Landlock checks
        try:
            os.ftruncate(descriptor, length)
        finally:
            os.close(descriptor)

    return truncated


def _is_own(path: Any, dir_fd: int | None = None, follow_symlinks: bool = True) -> bool:
    name = f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path)
    if dir_fd is not None:
        name = os.path.join(f"/proc/self/fd/{dir_fd}", name)
    folder, base = os.path.split(os.path.abspath(name))
    found = os.path.realpath(name) if follow_symlinks else os.path.join(os.path.realpath(folder), base)
    return found == _own_directory or found.startswith(f"{_own_directory}/")
