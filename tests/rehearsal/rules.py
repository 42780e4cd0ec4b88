"""CUDA's rules for claimed tensors: operands of one device, and which operators make the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.claims import (
    CPU,
    META,
    STATE,
    claim,
    has_storage,
    is_claimed,
    is_pinned,
    launch,
    place,
    tensors_in,
)
from tests.rehearsal.streams import note
from tests.rehearsal.synchronizations import refuse_pageable

_MAY_MIX = {"copy_", "_to_copy", "set_", "detach", "alias", "is_same_size", "_has_compatible_shallow_copy_type"}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_TAKES_HOST_SCALARS = {"masked_fill", "masked_fill_", "fill_", "fill", "where"}
"""Besides the operators that torch tags as pointwise."""
_NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "set_",
    "is_same_size",
    "_has_compatible_shallow_copy_type",
}
_ALWAYS_WAIT = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}


class Rules(TorchDispatchMode):
    """Claims the results of operators, and refuses and counts what CUDA would; see `torch.cuda.set_sync_debug_mode`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # our own queries are not part of what is judged
            inputs, devices = _devices(func, args, kwargs)
            on_gpu = not STATE.unchecked and any(device.type == "cuda" for device in devices)
            waits = on_gpu and _waits(_name(func), args, kwargs)
        out = func(*args, **kwargs)
        if not STATE.unchecked:
            with torch._C.DisableTorchFunction():
                made = _placed(out, inputs, devices)
                if on_gpu and (written := _written(func)) is not None:
                    _launch(func, args, kwargs, written, made)
                if waits:
                    note(_name(func))
        return out


def _name(func: Any) -> str:
    return func._schema.name.split("::")[-1]  # type: ignore[no-any-return]


def _devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.device]]:
    """All tensors that an operator is given, and the device of its results, one or one for each."""
    name, inputs = _name(func), tensors_in((args, kwargs))
    rows = list(_rows(args)) if name.startswith("_foreach_") else [inputs]
    return inputs, [_common(func, name, row) for row in rows]


def _placed(out: Any, inputs: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """The results that have storages of their own."""
    theirs = {id(tensor.untyped_storage()) for tensor in inputs if has_storage(tensor)}
    return [
        place(leaf, devices[number] if len(devices) > 1 else devices[0])
        for number, leaf in enumerate(tensors_in(out))
        if has_storage(leaf) and id(leaf.untyped_storage()) not in theirs
    ]


def _launch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: frozenset[str], made: list[torch.Tensor]
) -> None:
    """The operator is given to the current stream."""
    reads, writes = list[torch.Tensor](), made
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        (writes if argument.name in written else reads).extend(tensors_in(value))
    launch(_name(func), reads, writes)


@cache
def _written(func: Any) -> frozenset[str] | None:
    """Names of the arguments that an operator writes; None where it looks at no number of any tensor."""
    schema, name = func._schema, _name(func)
    if schema.name.startswith("c10d::"):
        return frozenset(a.name for a in schema.arguments if not a.name.startswith("input"))
    if name in _NO_KERNEL or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return None
    return frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _rows(args: Sequence[Any]) -> Sequence[tuple[torch.Tensor, ...]]:
    """The operands of each call that an operator over lists stands for."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor)]
    return list(zip(*lists, strict=True))


def _common(func: Any, name: str, inputs: Sequence[torch.Tensor]) -> torch.device:
    """The device that the operands have in common. Raises RuntimeError in torch's words when there is none."""
    if name != "copy_":
        inputs = [tensor for tensor in inputs if claim(tensor) != META]
    claims = [claim(tensor) for tensor in inputs]
    gpus = {device for device in claims if device.type == "cuda"}
    if not gpus:
        return CPU
    device = claims[0] if name in _MAY_MIX else next(iter(gpus))
    if STATE.unchecked or set(claims) == {device} or name in _MAY_MIX:
        return device
    if len(gpus) == 1:
        if name in _INDEXING and claims[0] == device:
            return device
        scalars = all(tensor.dim() == 0 for tensor, where in zip(inputs, claims, strict=True) if where == CPU)
        mixes = torch.Tag.pointwise in func.tags or name.startswith("_foreach_") or name in _TAKES_HOST_SCALARS
        if scalars and mixes and not (name.endswith("_") and claims[0] == CPU):
            return device
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"{' and '.join(sorted(map(str, set(claims))))}! (operator {func._schema.name})"
    )


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    rule = _SOMETIMES_WAIT.get(name)
    return name in _ALWAYS_WAIT or (rule is not None and rule(args, kwargs))


def _copies_across(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    across = is_claimed(args[1]) and claim(args[0]) != claim(args[1])
    if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
        return across
    if across and claim(args[1]) == CPU and not is_pinned(args[1]):
        refuse_pageable()
    return False


def _indices_wait(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """A mask is searched, and indices on the host are copied."""
    indices = [index for index in args[1] if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) or claim(index) != claim(args[0]) for index in indices)


def _writes_wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """One value written through a mask needs no search."""
    added = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    masks = all(index is None or index.dtype == torch.bool for index in args[1])
    return _indices_wait(args, kwargs) and not (masks and not added and args[2].numel() == 1)


_SOMETIMES_WAIT: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    "copy_": _copies_across,
    "index": _indices_wait,
    "_unsafe_index": _indices_wait,
    "index_put": _writes_wait,
    "index_put_": _writes_wait,
    "_index_put_impl_": _writes_wait,
    "repeat_interleave": lambda args, kwargs: kwargs.get("output_size") is None,
}
