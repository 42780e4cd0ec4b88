"""Copies from host memory to a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

_ALIGNED = 16
"""Bytes that tensors of a copy begin at multiples of, as kernels read them by 16."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`, as `all_to_device` does."""
    return all_to_device([tensor], device)[0]


def all_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return `tensors` of any dtypes on `device`; from host memory to a GPU in one copy, of which they are views.

    CUDA stages a copy from pageable memory in stream order above 64 KiB, `non_blocking` or not, and the host waits.
    The pinned memory comes from torch's cache, which reuses it once the device has read it.
    """
    if device.type != "cuda" or any(each.device.type != "cpu" for each in tensors):
        return [each.to(device) for each in tensors]
    sizes = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tensors]
    ends = list(accumulate(sizes))
    slab = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    places = [slice(end - size, end - size + each.nbytes) for each, size, end in zip(tensors, sizes, ends, strict=True)]
    for each, place in zip(tensors, places, strict=True):
        slab[place].view(each.dtype).view(each.shape).copy_(each)
    there = slab.to(device, non_blocking=True)
    return [there[place].view(each.dtype).view(each.shape) for each, place in zip(tensors, places, strict=True)]
