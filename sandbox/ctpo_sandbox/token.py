"""The secret that server and clients share: from the environment, or from a file that only its owner can read."""

import os
from pathlib import Path

TOKEN = "SANDBOX_TOKEN"
TOKEN_FILE = "SANDBOX_TOKEN_FILE"


def shared_token() -> str | None:
    """The value of SANDBOX_TOKEN, else the content of the file that SANDBOX_TOKEN_FILE names; None without either.

    Raises ValueError, with what to do, for a file that is missing, empty, or open to other users.
    """
    if token := os.environ.get(TOKEN):
        return token
    name = os.environ.get(TOKEN_FILE)
    return _read(Path(name)) if name else None


def _read(path: Path) -> str:
    try:
        others, token = path.stat().st_mode & 0o077, path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{TOKEN_FILE}={path}: {error.strerror}") from error
    if others:
        raise ValueError(f"{TOKEN_FILE}={path} can be read or written by other users; type chmod 600 {path}")
    if not token:
        raise ValueError(f"{TOKEN_FILE}={path} is empty; write the server's token into it")
    return token
