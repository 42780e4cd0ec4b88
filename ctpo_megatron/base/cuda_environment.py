"""Variables of CUDA that trainer ranks set for themselves. Imports no torch: CUDA reads them when it starts."""

from __future__ import annotations

import os

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ours: set[str] = set()


def order_kernels() -> None:
    """Give this process one queue of kernels, unless the user has chosen; call before CUDA starts.

    Under tensor parallelism megatron-core launches a collective and then the product that hides it, and relies on the
    GPU to begin them in this order (megatron-core 0.16.1, `tensor_parallel/layers.py`).
    """
    if MAX_CONNECTIONS not in os.environ:
        os.environ[MAX_CONNECTIONS] = "1"
        _ours.add(MAX_CONNECTIONS)


def of_this_rank() -> frozenset[str]:
    """Variables that this process has set for itself: engines that it starts must not inherit them."""
    return frozenset(_ours)
