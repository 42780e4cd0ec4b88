"""The address of this node's sandbox, from the environment or from a file."""

from ctpo_sandbox.variables import from_environment


def node_url() -> str | None:
    """The URL in CTPO_SANDBOX_URL or in the file of CTPO_SANDBOX_URL_FILE; None without either.

    Raises ValueError as `from_environment` does.
    """
    return from_environment("CTPO_SANDBOX_URL", fix="`ctpo sandbox serve --announce FILE` writes it once it is ready")
