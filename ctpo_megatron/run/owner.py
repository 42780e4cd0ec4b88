"""One process at a time writes into a run directory: the lock that it holds until it ends."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from ctpo_megatron.base.run_paths import RunPaths

log = logging.getLogger(__name__)


def claim(directory: Path) -> int:
    """Lock `directory` for this process and return the descriptor that holds the lock; closing it gives it back.

    Left open, it is given back by the kernel when the process ends, however it ends. Raises BlockingIOError, whose
    message is the owner as the file names it, when another process holds it. A file system without locks is a warning.
    """
    descriptor = os.open(RunPaths(directory).owner, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Not flock: forked children would share that lock, and one that outlives the run would keep it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        owner = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        raise BlockingIOError(owner or "an unidentified process") from error
    except OSError as error:
        log.warning("%s cannot be locked (%s): a second job in it would go unnoticed", directory, error)
    os.ftruncate(descriptor, 0)
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {started}\n".encode())
    return descriptor
