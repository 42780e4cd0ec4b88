"""Copies from host memory to a device that the host does not wait for."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`, copied from pinned memory where that is a GPU.

    CUDA stages a copy from pageable memory in stream order above 64 KiB, `non_blocking` or not, and the host waits.
    The pinned copy comes from torch's cache, which reuses it once the device has read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
