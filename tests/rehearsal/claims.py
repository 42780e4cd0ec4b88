"""Claimed devices: every storage says on which device it is, whatever holds its numbers (the CPU)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tests.rehearsal import streams
from tests.rehearsal.allocator import Allocation
from tests.rehearsal.streams import here

CPU, META = torch.device("cpu"), torch.device("meta")
PINNED = "pinned_in_rehearsal"


class State(threading.local):
    """Of this thread. unchecked: how many calls are under way that no rule looks at, and whose results are placed by
    the caller."""

    unchecked = 0


STATE = State()


def current() -> torch.device:
    """The selected GPU."""
    return torch.device("cuda", here().index)


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
    """Not so a record of what several ranks hold, whose class dispatches by itself, nor a sparse tensor."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout == torch.strided and not tensor.is_meta


def claim(tensor: torch.Tensor) -> torch.device:
    """The device that a tensor says it is on."""
    if has_storage(tensor):
        return getattr(tensor.untyped_storage(), "claim", CPU)
    return META if tensor.is_meta else CPU


def is_claimed(tensor: torch.Tensor) -> bool:
    """Not so what a library made out of sight, for instance what gloo copies a collective's result from."""
    return has_storage(tensor) and hasattr(tensor.untyped_storage(), "claim")


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether memory of the host is pinned, which a copy to a device reads without the host."""
    return hasattr(tensor.untyped_storage(), PINNED)


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Say that the storage of a tensor is on a device, and have memory for it there."""
    if has_storage(tensor):
        storage: Any = tensor.untyped_storage()
        storage.claim = device
        storage.memory = _memory(storage.nbytes()) if device.type == "cuda" else None
    return tensor


def resize(storage: Any) -> None:
    """The storage has another size now."""
    if getattr(storage, "memory", None) is not None:
        storage.memory = None  # given back before more is taken
        storage.memory = _memory(storage.nbytes())


def memory(tensor: torch.Tensor) -> Allocation | None:
    """What the storage of a tensor has on a GPU."""
    return getattr(tensor.untyped_storage(), "memory", None) if has_storage(tensor) else None


def _memory(size: int) -> Allocation:
    return Allocation(here().memory, size, streams.current())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on another device; the tensor itself if it is there."""
    if claim(tensor) == device:
        return tensor
    with unchecked():
        copy = tensor.clone()
    place(copy, device)
    launch("copy", reads=[tensor], writes=[copy])
    return copy


def launch(what: str, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()) -> None:
    """An operation on the current stream. Raises UnorderedAccess."""
    read = {id(found): (found.uses, tensor) for tensor in reads if (found := memory(tensor)) is not None}
    written = {id(found): (found.uses, tensor) for tensor in writes if (found := memory(tensor)) is not None}
    if read or written:
        streams.launch(what, read.values(), written.values())


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    STATE.unchecked += 1
    try:
        yield
    finally:
        STATE.unchecked -= 1
