"""What runs in the server's process: the HTTP API, the slots with their queue, and the processes of each slot."""

from ctpo_sandbox.server.main import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]
