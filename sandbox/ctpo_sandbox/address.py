"""Where the sandbox of this node is, as whoever runs it says: in the environment, or in a file."""

import os
from pathlib import Path

URL = "CTPO_SANDBOX_URL"
URL_FILE = "CTPO_SANDBOX_URL_FILE"


def node_url() -> str | None:
    """The value of CTPO_SANDBOX_URL, else the content of the file that CTPO_SANDBOX_URL_FILE names; None without both.

    Raises ValueError, with what to do, for a file that is missing or empty.
    """
    if url := os.environ.get(URL):
        return url
    name = os.environ.get(URL_FILE)
    return _read(Path(name)) if name else None


def _read(path: Path) -> str:
    try:
        url = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"{URL_FILE}={path}: {error.strerror}; `ctpo sandbox serve --announce {path}` writes it once it is ready"
        ) from error
    if not url:
        raise ValueError(f"{URL_FILE}={path} is empty; write the address of this node's sandbox into it")
    return url
