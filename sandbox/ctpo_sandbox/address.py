"""Where the sandbox of this node is, as whoever runs it says: in the environment, or in a file."""

from ctpo_sandbox.variables import from_environment


def node_url() -> str | None:
    """That of CTPO_SANDBOX_URL or CTPO_SANDBOX_URL_FILE; None without either.

    Raises ValueError as `from_environment` does.
    """
    return from_environment("CTPO_SANDBOX_URL", fix="`ctpo sandbox serve --announce FILE` writes it once it is ready")
