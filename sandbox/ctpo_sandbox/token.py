"""The secret that server and clients share: from the environment, or from a file that only its owner can read."""

from ctpo_sandbox.variables import from_environment

TOKEN = "SANDBOX_TOKEN"
TOKEN_FILE = "SANDBOX_TOKEN_FILE"


def shared_token() -> str | None:
    """The token in SANDBOX_TOKEN or the file of SANDBOX_TOKEN_FILE, if any. Raises ValueError as `from_environment`."""
    return from_environment(TOKEN, fix="write the server's token into it", private=True)
