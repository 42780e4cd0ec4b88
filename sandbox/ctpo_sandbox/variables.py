"""What servers and clients share: by environment variables, or by files that these name, an address and a secret; and
the name of a header.
"""

import os
from pathlib import Path

TOKEN = "SANDBOX_TOKEN"
TOKEN_FILE = "SANDBOX_TOKEN_FILE"
FAULT_HEADER = "x-sandbox-fault"
"""Of an HTTP 503: what failed over the run (`errors.Over`), if that may be the program's doing."""


def node_url() -> str | None:
    """Return the address of this node's sandbox, in CTPO_SANDBOX_URL or in the file of CTPO_SANDBOX_URL_FILE, if any.

    Raises ValueError for a file that is missing or empty.
    """
    return _from_environment("CTPO_SANDBOX_URL", fix="`ctpo sandbox serve --announce FILE` writes it once it is ready")


def shared_token() -> str | None:
    """Return the secret in SANDBOX_TOKEN, or in the file of SANDBOX_TOKEN_FILE that only its owner can read, if any.

    Raises ValueError for a file that is missing, empty, or open to other users.
    """
    return _from_environment(TOKEN, fix="write the server's token into it", private=True)


def authorization(token: str | None = None) -> dict[str, str]:
    """Headers with the given token, or with the token of the environment; none without either. Raises ValueError."""
    token = token or shared_token()
    return {"authorization": f"Bearer {token}"} if token else {}


def _from_environment(variable: str, *, fix: str, private: bool = False) -> str | None:
    """The value of `variable`, else the content of the file named by `<variable>_FILE`; None without either.

    fix: what to do about a file that is missing or empty. private: only its owner may read or write it. Raises
    ValueError for a file that is missing, empty, or open to other users.
    """
    if value := os.environ.get(variable):
        return value
    name = os.environ.get(f"{variable}_FILE")
    if not name:
        return None
    path = Path(name)
    named = f"{variable}_FILE={path}"
    try:
        others, value = path.stat().st_mode & 0o077, path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{named}: {error.strerror}; {fix}") from error
    if private and others:
        raise ValueError(f"{named} can be read or written by other users; type chmod 600 {path}")
    if not value:
        raise ValueError(f"{named} is empty; {fix}")
    return value
