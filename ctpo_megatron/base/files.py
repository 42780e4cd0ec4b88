"""Files that appear whole or not at all, and notes that a run can lose without harm."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk or a quota that has no room, for now."""
FULL_S, FULL_PAUSE_S = 300.0, 5.0
"""How long a write is tried again on a full disk, and the pause between two attempts, in seconds."""


class DamagedFileError(ValueError):
    """A file that a run has written does not hold what was written; the message names it."""


def is_pattern(text: str) -> bool:
    """Return whether a text is a glob pattern, and not a path that exists."""
    return glob.has_magic(text) and not os.path.exists(text)


def matching(pattern: str) -> list[Path]:
    """Return what a glob pattern matches, sorted; `**` is any folders. The folder that it begins with has its name, if
    it
    exists: brackets in that are no pattern.
    """
    path = Path(pattern)
    folder = next(parent for parent in path.parents if parent.exists())
    below = glob.glob(str(path.relative_to(folder)), root_dir=folder, recursive=True)
    return [folder / name for name in sorted(below)]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that does not say which file it is about, as at a full disk, the name of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def patiently(write: Callable[[], T], path: Path | None) -> T:
    """Return the result of `write`, which is called again for `FULL_S` while the disk is full; that is said once.

    path: what it writes, where its errors may not say so. Raises OSError.
    """
    deadline, said = time.monotonic() + FULL_S, False
    while True:
        try:
            with nullcontext() if path is None else naming(path):
                return write()
        except OSError as error:
            if error.errno not in FULL or time.monotonic() > deadline:
                raise
            if not said:
                said = True
                log.warning("%s: it is tried again for %.0f s; free space there (df -h)", error, FULL_S)
            time.sleep(FULL_PAUSE_S)


@contextmanager
def aside(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Provide a temporary path next to `path`; the file written there is then renamed to `path`, so readers see the
    old or the new.

    `durable` waits until the disk has it. Without, a machine that loses power can leave an empty file. Nothing is left
    of a file whose writing failed.
    """
    written = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path):
            yield written
            if durable:
                sync(written)
            written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder. Raises OSError, as where it has no room after all."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_text(path: Path, text: str) -> None:
    """Append text as UTF-8, whole or not at all; see `patiently`. Raises OSError, naming the file."""
    size = path.stat().st_size if path.exists() else 0

    def write() -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            if path.exists():
                os.truncate(path, size)
            raise

    patiently(write, path)


def write_text(path: Path, text: str, *, durable: bool = False, patient: bool = True) -> Path:
    """Write text as UTF-8, whole or not at all; see `aside` and, where it is `patient`, `patiently`. Returns `path`."""

    def write() -> None:
        with aside(path, durable=durable) as written:
            written.write_text(text, encoding="utf-8")

    if patient:
        patiently(write, path)
    else:
        write()
    return path


def write_json(path: Path, content: Any, *, durable: bool = False, patient: bool = True) -> Path:
    """Write indented JSON; see `write_text`. Returns `path`. Raises ValueError at NaN and infinity."""
    return write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n", durable=durable, patient=patient)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises DamagedFileError where there is none."""
    import yaml  # `ctpo --help` needs the rest of this module alone

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path} is damaged ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise DamagedFileError(f"{path} is damaged (it holds {'nothing' if found is None else type(found).__name__})")
    return found


def read_note(path: Path, read: Callable[[Any], T], without: T, loss: str) -> T:
    """Read the JSON of an optional file with `read`; returns `without` if the file is missing or damaged.

    `read` may raise whatever values of another kind make it raise. Damage is logged, with `loss`, what is missing then.
    """
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return without
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is damaged (%s: %s): %s", path, type(error).__name__, error, loss)
        return without


def claim(path: Path) -> int:
    """Lock a file, whose content then names this process; returns the descriptor, which releases the lock when closed.

    Else the kernel releases it when the process ends, however it ends. Raises BlockingIOError, whose message is the
    owner as the file names it, when another process holds it. A file system without locks is a warning.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Not flock: forked children would share that lock, and one that outlives the run would keep it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        owner = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        raise BlockingIOError(owner or "an unidentified process") from error
    except OSError as error:
        log.warning("%s cannot be locked (%s): a second job in that folder would go unnoticed", path, error)
    os.ftruncate(descriptor, 0)
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {started}\n".encode())
    return descriptor
