"""Values from environment variables, or from files that they name."""

import os
from pathlib import Path


def from_environment(variable: str, *, fix: str, private: bool = False) -> str | None:
    """The value of `variable`, else the content of the file named by `<variable>_FILE`; None without either.

    fix: what to do about a file that is missing or empty. private: only its owner may read or write it. Raises
    ValueError for a file that is missing, empty, or open to other users.
    """
    if value := os.environ.get(variable):
        return value
    name = os.environ.get(f"{variable}_FILE")
    return _read(f"{variable}_FILE", Path(name), fix, private) if name else None


def _read(variable: str, path: Path, fix: str, private: bool) -> str:
    try:
        others, value = path.stat().st_mode & 0o077, path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{variable}={path}: {error.strerror}; {fix}") from error
    if private and others:
        raise ValueError(f"{variable}={path} can be read or written by other users; type chmod 600 {path}")
    if not value:
        raise ValueError(f"{variable}={path} is empty; {fix}")
    return value
