"""Directories for the files of runs without their own file system, checked for their size."""

import errno
import itertools
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ctpo_sandbox import libc
from ctpo_sandbox.records import Limits
from ctpo_sandbox.remove import remove_tree

_MB = 1024 * 1024
_BLOCK = 512  # the unit of st_blocks


class RunDirectory:
    """A directory of the server's file system for each run, at `path`; `owner`: the runs' user, if not the worker's.

    `namespaces.RunMount` has the same methods.
    """

    def __init__(self, parent: str, owner: int | None, limits: Limits) -> None:
        self._parent, self._owner, self._limits = parent, owner, limits
        self.path = f"{parent}/run"
        os.makedirs(parent, mode=0o711)

    def make(self) -> None:
        """Create it, empty."""
        os.mkdir(self.path, 0o700)
        if self._owner is not None:
            os.chown(self.path, self._owner, self._owner)

    def excess(self, child: int) -> str:
        """The limit of disk use that the run `child` exceeds; "" for none.

        Deleted files that are still open count; deleted files that are only mapped are limited by the memory.
        """
        try:
            return self._excess(itertools.chain(files_below(self.path), self._nameless(child)))
        except (FileNotFoundError, ProcessLookupError):  # the run ended meanwhile
            return ""

    def excess_left(self) -> str:
        """The limit of disk use that the files of a run exceed that has ended; "" for none."""
        return self._excess(files_below(self.path))

    def _excess(self, found: Iterator[os.stat_result]) -> str:
        most_files, most_mb = self._limits.disk_files, self._limits.disk_mb
        size = 0
        try:
            for files, file in enumerate(found, start=1):
                size += file.st_blocks * _BLOCK
                if files > most_files or size > most_mb * _MB:
                    return f"for more than {most_mb} MB or {most_files} files"
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return "for a path that is too long to follow"
        return ""

    def _nameless(self, child: int) -> Iterator[os.stat_result]:
        """In every thread's table of descriptors: without a filter each may have its own, and the first may be gone."""
        device = os.stat(self.path).st_dev  # the outputs are memory files on another device
        seen: set[int] = set()
        with self._as_owner():
            for descriptor in _descriptors(child):
                with suppress(FileNotFoundError):
                    found = os.stat(descriptor)
                    new = found.st_ino not in seen
                    if new and found.st_nlink == 0 and found.st_dev == device and stat.S_ISREG(found.st_mode):
                        seen.add(found.st_ino)
                        yield found

    @contextmanager
    def _as_owner(self) -> Iterator[None]:
        """The kernel shows the open files of a process to its user; a container's root may not be allowed."""
        if self._owner is None:
            yield
            return
        os.setegid(self._owner)
        os.seteuid(self._owner)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            libc.die_with_parent(os.getppid(), signal.SIGKILL)  # a change of user clears this setting

    def discard_quickly(self) -> bool:
        """Remove it with the run's files if that is quick; returns whether it did."""
        try:
            os.rmdir(self.path)
        except OSError:  # not empty
            return False
        return True

    def discard(self) -> None:
        """Remove it, however long that takes."""
        remove_tree(self.path)

    def close(self) -> None:
        """Remove everything."""
        remove_tree(self._parent)


def _descriptors(process: int) -> Iterator[str]:
    """Paths of the open files of its threads."""
    for thread in os.listdir(f"/proc/{process}/task"):
        table = f"/proc/{process}/task/{thread}/fd"
        # The thread has just ended, or the run is dropping privileges.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            yield from (f"{table}/{number}" for number in os.listdir(table))


def files_below(directory: str) -> Iterator[os.stat_result]:
    """All files, including directories and links; links are not followed."""
    pending = [directory]
    while pending:
        current = pending.pop()
        for entry in _listed(current):
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    pending.append(entry.path)
                yield found


def _listed(directory: str) -> list[os.DirEntry[str]]:
    """Nothing for a directory that the run has removed meanwhile: the others count all the same."""
    with suppress(FileNotFoundError):
        try:
            return list(os.scandir(directory))
        except PermissionError:
            os.chmod(directory, 0o700)
            return list(os.scandir(directory))
    return []
