"""Claimed devices: every storage says on which device it is, whatever holds its numbers (the CPU)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

CPU = torch.device("cpu")


class State:
    """Of this process. index: the selected GPU; unchecked: how many calls are under way that no rule looks at."""

    index = 0
    unchecked = 0


def current() -> torch.device:
    """The selected GPU."""
    return torch.device("cuda", State.index)


def named(device: object) -> torch.device:
    """The device that an argument of torch names; a number is a GPU, "cuda" the selected one."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device(device)  # type: ignore[arg-type]
    return current() if found.type == "cuda" and found.index is None else found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of nested lists, tuples and dicts, in order (torch's own search takes a third of a rehearsal)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def has_storage(tensor: torch.Tensor) -> bool:
    """Not so a record of what several ranks hold, which is of a class of its own, nor a sparse tensor."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def claim(tensor: torch.Tensor) -> torch.device:
    """The device that a tensor says it is on."""
    return getattr(tensor.untyped_storage(), "claim", CPU) if has_storage(tensor) else CPU


def is_claimed(tensor: torch.Tensor) -> bool:
    """Not so what a library made out of sight, for instance what gloo copies a collective's result from."""
    return has_storage(tensor) and hasattr(tensor.untyped_storage(), "claim")


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Say that the storage of a tensor is on a device."""
    if has_storage(tensor):
        tensor.untyped_storage().claim = device  # type: ignore[attr-defined]
    return tensor


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on another device; the tensor itself if it is there."""
    if claim(tensor) == device:
        return tensor
    with unchecked():
        copy = tensor.clone()
    return place(copy, device)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    State.unchecked += 1
    try:
        yield
    finally:
        State.unchecked -= 1
