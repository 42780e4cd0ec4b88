"""Removal of directories that a snippet filled."""

import errno
import itertools
import logging
import os

_log = logging.getLogger("ctpo_sandbox.remove")


def remove_tree(directory: str) -> None:
    """Remove a directory: any depth, any permissions, symbolic links not followed. A failure is logged.

    By descriptors: no name that a snippet could exchange for a link on the way is ever gone through.
    """
    try:
        top = _enter(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.error("work directory %s is left behind: %s", directory, error)
        return
    try:
        _empty(top)
        os.rmdir(directory)
    except OSError as error:
        _log.error("work directory %s is left behind: %s", directory, error)
    finally:
        os.close(top)


def _enter(name: str, parent: int | None = None) -> int:
    """A descriptor of a directory, which is readable and writable for its owner afterwards."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(handle)


def _empty(top: int) -> None:
    """Directories inside others are lifted to the top first, so that no path and no recursion grows with the depth."""
    numbers = itertools.count()
    pending = _remove_files(top)
    while pending:
        name = pending.pop()
        current = _enter(name, top)
        try:
            for inner in _remove_files(current):
                pending.append(_lift(inner, current, top, numbers))
        finally:
            os.close(current)
        os.rmdir(name, dir_fd=top)


def _remove_files(directory: int) -> list[str]:
    """Remove all but the directories that are not empty, whose names it returns."""
    with os.scandir(directory) as entries:
        listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    left = []
    for name, is_directory in listed:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
        elif not _remove_empty(name, directory):
            left.append(name)
    return left


def _remove_empty(name: str, parent: int) -> bool:
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _lift(name: str, source: int, top: int, numbers: "itertools.count[int]") -> str:
    os.close(_enter(name, source))  # a directory that its owner may not write cannot be moved
    for number in numbers:
        lifted = f"{number}.lifted"
        try:
            os.lstat(lifted, dir_fd=top)
        except FileNotFoundError:
            os.rename(name, lifted, src_dir_fd=source, dst_dir_fd=top)
            return lifted
    raise AssertionError("itertools.count ended")
