"""Files that appear whole or not at all, and notes that a run can lose without harm."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

log = logging.getLogger(__name__)
T = TypeVar("T")


class DamagedFileError(ValueError):
    """A file that a run has written does not hold what was written; the message names it."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that does not say which file it is about, as at a full disk, the name of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def aside(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary path next to `path`; the file written there is then renamed to `path`, so readers see the old or the
    new.

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


def write_text(path: Path, text: str, *, durable: bool = False) -> Path:
    """Write text as UTF-8, whole or not at all; see `aside`. Returns `path`."""
    with aside(path, durable=durable) as written:
        written.write_text(text, encoding="utf-8")
    return path


def write_json(path: Path, content: Any, *, durable: bool = False) -> Path:
    """Write indented JSON, whole or not at all; see `aside`. Returns `path`. Raises ValueError at NaN and infinity."""
    return write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n", durable=durable)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises DamagedFileError where there is none."""
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
