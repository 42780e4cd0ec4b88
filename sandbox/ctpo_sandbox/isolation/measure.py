"""Measures a run from outside while it runs: its threads, its files, and its open files without a name.

The run decides what is found and changes it meanwhile, so everything is opened below a descriptor and no link is
followed. A look that the run disturbed is repeated with the run stopped, and what is then still not certain is an
error: a limit that cannot be checked is exceeded.
"""

import errno
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import NamedTuple

from ctpo_sandbox.records import Limits
from ctpo_sandbox.timeouts import STOP_POLL_S, STOP_RUN_TIMEOUT_S

_MB = 1024 * 1024
_BLOCK = 512  # the unit of st_blocks
_RECENT_NS = 20_000_000  # file systems date changes by a clock with ticks of up to 10 ms
_STATE, _FLAGS, _THREADS = 0, 6, 17  # fields of /proc/<pid>/stat, counted from the state
_EXITING = 0x4  # PF_EXITING: it has no open files any more
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Disturbed(Exception):
    """What was measured changed meanwhile, or could not be seen."""


class File(NamedTuple):
    """Identifies a file: its file system and its number there."""

    device: int
    inode: int


def thread_excess(process: int, most: int | None) -> str:
    """Return the reason to end the run `process` for its threads; "" for none. most: None where the kernel counts them.

    "" also for one that something else has just killed: its worker reports that. Raises OSError where /proc does not
    show it; it is there until its worker has waited for it.
    """
    fields = _fields(f"/proc/{process}/stat")
    if fields[_STATE] == b"Z":  # other threads still run, and /proc shows nothing of the first
        return "" if _was_killed(process) else "because its first thread has ended"
    return f"for more than {most} threads" if most is not None and int(fields[_THREADS]) > most else ""


def _was_killed(process: int) -> bool:
    """Whether the whole process got SIGKILL, which stays pending until the process is waited for."""
    with open(f"/proc/{process}/status", "rb") as file:
        pending = next((line.split()[1] for line in file if line.startswith(b"ShdPnd:")), b"0")
    return bool(int(pending, 16) & 1 << signal.SIGKILL - 1)


def _fields(path: str) -> list[bytes]:
    """As bytes: the name in it is the program's, and need not be text."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def files_left_excess(directory: int, limits: Limits) -> str:
    """Return the reason for which a run that has ended exceeded its limits by its files in `directory`; "" for none.

    directory: a descriptor. Raises OSError where they cannot be counted.
    """
    return _look(directory, limits, None, None, still=True)


def file_excess(directory: int, limits: Limits, process: int, own: frozenset[File] | None) -> str:
    """Return the reason to end the run `process` for its files; "" for none.

    directory: a descriptor of the run's directory. own: open files without a name that do not count; None where the
    open files of a run cannot be seen, and none count. Raises OSError and Disturbed for a run that cannot be measured.
    """
    try:
        if not _look(directory, limits, process, own, still=False):
            return ""
    except (Disturbed, OSError):
        pass  # the next look decides
    with _stopped(process):
        return _look(directory, limits, process, own, still=True)


def _look(directory: int, limits: Limits, process: int | None, own: frozenset[File] | None, *, still: bool) -> str:
    """One look. still: the run cannot change anything meanwhile. Raises Disturbed where it did, or might have."""
    files = size = 0
    with ExitStack() as opened:
        for found in chain(files_below(directory, opened, still=still), _nameless(process, own, still=still)):
            files += 1
            size += found.st_blocks * _BLOCK
            if files > limits.disk_files or size > limits.disk_mb * _MB:
                return f"for more than {limits.disk_mb} MB or {limits.disk_files} files"
    return ""


def files_below(directory: int, opened: ExitStack, *, still: bool) -> Iterator[os.stat_result]:
    """Yield all files below a directory, including directories and links; `opened` closes what is opened.

    Every directory stays open until the end, when its date tells whether a file may have been moved in or out: from
    where none had looked to where one had. Raises Disturbed then.
    """
    dates: list[tuple[int, int]] = []
    pending = [directory]
    while pending:
        current = pending.pop()
        changed_ns = os.fstat(current).st_ctime_ns
        if not still and changed_ns > time.time_ns() - _RECENT_NS:
            raise Disturbed("a directory changed just now, and another change might have the same date")
        dates.append((current, changed_ns))
        with os.scandir(current) as entries:
            for entry in entries:
                found = _status(entry)
                if stat.S_ISDIR(found.st_mode):
                    pending.append(entered(entry.name, current))
                    opened.callback(os.close, pending[-1])
                yield found
    if any(os.fstat(descriptor).st_ctime_ns != before for descriptor, before in dates):
        raise Disturbed("a directory changed")


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError as error:
        raise Disturbed(f"a file changed: {error.strerror}") from error


def entered(name: str, parent: int | None = None) -> int:
    """Return a descriptor of a directory, made readable for its owner if need be. Raises Disturbed unless it is one.

    parent: a descriptor of the directory in which it is; `name` is a path otherwise.
    """
    try:
        return _readable(name, parent)
    except PermissionError:
        pass
    except OSError as error:
        raise _changed(error) from error
    try:
        handle = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        finally:
            os.close(handle)
        return _readable(name, parent)
    except OSError as error:
        raise _changed(error) from error


def _readable(name: str, parent: int | None) -> int:
    descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        os.stat(".", dir_fd=descriptor)  # fails where it can be listed, but not entered
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _changed(error: OSError) -> Exception:
    return Disturbed(f"a directory changed: {error.strerror}") if error.errno in (*_CHANGED, errno.EACCES) else error


def _nameless(process: int | None, own: frozenset[File] | None, *, still: bool) -> Iterator[os.stat_result]:
    """Deleted files that are still open, each once; none without a process, or where its open files are hidden (own).

    All threads share one table of descriptors (`syscalls`). Deleted files that are only mapped are limited by the
    memory. Raises Disturbed for a descriptor that cannot be seen, unless the run is ending, and for any file that a
    run that continues may pass between its descriptors meanwhile.
    """
    if process is None or own is None:
        return
    seen = set(own)
    try:
        for number in os.listdir(f"/proc/{process}/fd"):
            found = os.stat(f"/proc/{process}/fd/{number}")
            file = File(found.st_dev, found.st_ino)
            if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) and file not in seen:
                if not still:
                    raise Disturbed("the run may pass open files on between its descriptors")
                seen.add(file)
                yield found
    except OSError as error:
        if not int(_fields(f"/proc/{process}/stat")[_FLAGS]) & _EXITING:
            raise Disturbed(f"open files of the run cannot be seen: {error.strerror}") from error


@contextmanager
def _stopped(process: int) -> Iterator[None]:
    """All threads of a child stand still inside. Raises Disturbed for one that does not stop in time."""
    by_itself = _fields(f"/proc/{process}/stat")[_STATE] == b"T"  # and it is to stay so
    try:
        deadline = time.monotonic() + STOP_RUN_TIMEOUT_S
        while True:
            if not by_itself:
                os.kill(process, signal.SIGSTOP)  # again, as a thread may have sent SIGCONT
            if os.waitid(os.P_PID, process, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                break
            if time.monotonic() > deadline:
                if all(_is_still(process) for _ in range(2)):
                    break
                raise Disturbed(f"the run did not stop within {STOP_RUN_TIMEOUT_S:g} s")
            time.sleep(STOP_POLL_S)
        yield
    finally:
        if not by_itself:
            os.kill(process, signal.SIGCONT)


def _is_still(process: int) -> bool:
    """Whether no thread runs, though one may wait for a slow disk, and stops only then."""
    threads = [f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")]
    return all(_fields(f"{thread}/stat")[_STATE] in b"TtDZX" for thread in threads)
