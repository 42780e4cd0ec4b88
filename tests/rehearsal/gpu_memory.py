"""CUDA IPC between processes that are one: a handle names memory, and what is rebuilt from it is that memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing import reductions

from tests.rehearsal.claims import claim

_shared: dict[int, torch.Tensor] = {}
_DEVICE = 6
"""Place of the device's index in the arguments, as in torch's."""


def install() -> None:
    """Before vLLM imports the two functions by name."""
    reductions.reduce_tensor = _reduced(reductions.reduce_tensor)
    reductions.rebuild_cuda_tensor = _rebuilt


def collect() -> None:
    """`torch.cuda.ipc_collect`: no process holds the memory any longer."""
    _shared.clear()


def _reduced(original: Any) -> Any:
    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if claim(tensor).type != "cuda":
            return original(tensor)
        number = len(_shared)
        _shared[number] = tensor
        return _rebuilt, (number, *(None,) * (_DEVICE - 1), claim(tensor).index)

    return reduce_tensor


def _rebuilt(number: int, *_: Any) -> torch.Tensor:
    return _shared[number].detach()
