"""Removal of directories that a snippet filled."""

import errno
import itertools
import logging
import os

_log = logging.getLogger("ctpo_sandbox.isolation.remove")


def remove_tree(directory: str) -> None:
    """`remove_whole`, of which a failure is logged."""
    try:
        remove_whole(directory)
    except OSError as error:
        _log.error("work directory %s is left behind: %s", directory, error)


def remove_whole(directory: str) -> None:
    """Remove a directory: any depth, any permissions, symbolic links not followed. Raises OSError.

    Uses descriptors, so a snippet cannot redirect it by replacing a directory with a link.
    """
    try:
        top = _enter(directory)
    except FileNotFoundError:
        return
    try:
        _empty(top)
        os.rmdir(directory)
    finally:
        os.close(top)


def _enter(name: str, parent: int | None = None) -> int:
    """A descriptor of a directory, made readable and writable for its owner."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(handle)


def _empty(top: int) -> None:
    """Nested directories are first moved to the top, so that neither paths nor recursion grow with the depth."""
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
    """Remove everything except non-empty directories; returns their names."""
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
    os.close(_enter(name, source))  # a directory that is not writable for its owner cannot be moved
    for number in numbers:
        lifted = f"{number}.lifted"
        try:
            os.lstat(lifted, dir_fd=top)
        except FileNotFoundError:
            os.rename(name, lifted, src_dir_fd=source, dst_dir_fd=top)
            return lifted
    raise AssertionError("itertools.count ended")
