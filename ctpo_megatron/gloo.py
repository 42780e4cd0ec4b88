"""One thread for the network in place of one for each of gloo's groups.

PyTorch gives every group a device of its own, and the thread of each wakes a hundred times a second, whether the group
is used or not. Megatron-Core alone makes more than twenty groups of a rank: two thousand times a second a thread that
computes is interrupted. gloo's devices can be shared; PyTorch has no public way to say so (2.13).
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, default_pg_timeout

_THREADS = 2
"""Of a group, for each of its devices, as PyTorch has it; they sleep while there is nothing to do."""
_of_torch: Any = ProcessGroupGloo.__init__


def share_devices() -> None:
    """Let the groups that are made from now on share their devices: one, or those of GLOO_SOCKET_IFNAME."""
    ProcessGroupGloo.__init__ = _init  # type: ignore[assignment,method-assign]


def _init(group: Any, store: Any, rank: int, size: int, timeout: Any = default_pg_timeout) -> None:
    options = timeout
    if isinstance(timeout, timedelta):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = _THREADS * len(options._devices)
        options._timeout = timeout
    _of_torch(group, store, rank, size, options)


@cache
def _devices(process: int, interfaces: str) -> list[Any]:
    """process: whose they are. Their threads do not survive a fork."""
    names = [name for name in interfaces.split(",") if name]
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in names]
