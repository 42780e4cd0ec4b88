"""Directories for the files of runs without their own file system, checked for their size."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ctpo_sandbox.isolation import libc
from ctpo_sandbox.isolation.measure import File, entered, file_excess, files_left_excess
from ctpo_sandbox.isolation.remove import remove_tree
from ctpo_sandbox.records import Limits

_NAME_BYTES = 16


class RunDirectory:
    """A directory of the server's file system for each run, by a `path` without links.

    Its name is random: other runs of the same user, which may ask for names that they know, must not guess it. owner:
    the runs' user, if not the worker's. sees_open_files: whether the worker can see the open files of a run.
    `namespaces.RunMount` has the same methods.
    """

    def __init__(self, parent: str, owner: int | None, limits: Limits, *, sees_open_files: bool) -> None:
        self._owner, self._limits, self._sees_open_files = owner, limits, sees_open_files
        self.path = ""
        self._removed = False
        os.makedirs(parent, mode=0o711)
        self._parent = os.path.realpath(parent)

    def make(self) -> None:
        """Create it, empty, at a new `path`."""
        self.path = f"{self._parent}/{os.urandom(_NAME_BYTES).hex()}"
        self._removed = False
        os.mkdir(self.path, 0o700)
        if self._owner is not None:
            os.chown(self.path, self._owner, self._owner)

    def excess(self, child: int, outputs: Sequence[int]) -> str:
        """Return the limit of disk use that the run `child` exceeds; "" for none. outputs: its open files that do not
        count.

        Raises OSError and measure.Disturbed for a run that cannot be measured.
        """
        own = frozenset(map(_file, outputs)) if self._sees_open_files else None
        with self._as_owner(), self._opened() as directory:
            return file_excess(directory, self._limits, child, own)

    def excess_left(self) -> str:
        """Return the limit of disk use that the files of a run exceed that has ended; "" for none. Raises OSError."""
        if self.discard_quickly():
            return ""
        with self._opened() as directory:
            return files_left_excess(directory, self._limits)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        directory = entered(self.path)  # which the run may have closed
        try:
            yield directory
        finally:
            os.close(directory)

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
        if not self._removed:
            try:
                os.rmdir(self.path)
            except OSError:  # not empty
                return False
            self._removed = True
        return True

    def discard(self) -> None:
        """Remove it, however long that takes."""
        remove_tree(self.path)

    def close(self) -> None:
        """Remove everything."""
        remove_tree(self._parent)


def _file(descriptor: int) -> File:
    found = os.fstat(descriptor)
    return File(found.st_dev, found.st_ino)
