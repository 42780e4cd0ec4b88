"""Removal of directories that a snippet filled."""

import logging
import os
import subprocess

_CLEANUP_TIMEOUT_S = 30.0
_REMOVE_TREE = 'find "$1" -type d ! -perm -700 -exec chmod u+rwx {} \\; ; rm -rf -- "$1"'
_log = logging.getLogger("ctpo_sandbox.remove")


def remove_tree(directory: str) -> None:
    """Remove a directory: any depth, any permissions, symbolic links not followed. A failure is logged."""
    try:
        os.rmdir(directory)
        return
    except FileNotFoundError:
        return
    except OSError:
        command = ["sh", "-c", _REMOVE_TREE, "sh", directory]
    try:
        done = subprocess.run(command, timeout=_CLEANUP_TIMEOUT_S, capture_output=True, text=True, check=False)
        problem = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"rm -rf did not finish within {_CLEANUP_TIMEOUT_S:g} s"
    if problem:
        _log.error("work directory %s is left behind: %s", directory, problem)
