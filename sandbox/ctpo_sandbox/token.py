"""The secret that server and clients share: from the environment, or from a file that only its owner can read."""

from ctpo_sandbox.variables import from_environment

TOKEN = "SANDBOX_TOKEN"
TOKEN_FILE = "SANDBOX_TOKEN_FILE"


def shared_token() -> str | None:
    """That of SANDBOX_TOKEN or SANDBOX_TOKEN_FILE; None without either. Raises ValueError as `from_environment`."""
    return from_environment(TOKEN, fix="write the server's token into it", private=True)
