"""Answers questions after devices, and requests for them, with the claims of `claims.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from tests.rehearsal.claims import (
    CPU,
    META,
    PINNED,
    STATE,
    claim,
    current,
    has_storage,
    is_pinned,
    launch,
    moved,
    named,
    place,
    tensors_in,
    unchecked,
)
from tests.rehearsal.streams import note
from tests.rehearsal.synchronizations import refuse_pageable

T = torch.Tensor
_FROM_HOST_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
_PRODUCTS = {torch.mm, torch.addmm}


class Requests(TorchFunctionMode):
    """What a machine with a GPU answers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        if func in (torch.autograd.backward, T.backward):
            with self:  # torch takes this mode away for the call, and passes that are computed again ask, too
                return _backward(*args, **kwargs)
        if func in _ANSWERS and has_storage(args[0]):
            return _ANSWERS[func](*args, **kwargs)
        if func in _PRODUCTS and "out_dtype" in kwargs:
            return _product(func, *args, **kwargs)
        if kwargs.get("device") is not None:
            made = _made(func, args, kwargs)
            return _pin(made) if pinned else made
        if func is T.new_tensor and claim(args[0]).type == "cuda":
            note("new_tensor")
        if func in (T.tolist, T.numpy, T.__array__) and claim(args[0]).type == "cuda":
            _leave(func, args[0])
        out = func(*args, **kwargs)
        if pinned:
            _pin(out)
        return place(out, CPU) if func is torch.from_numpy else out


def _leave(func: Callable[..., Any], tensor: torch.Tensor) -> None:
    if func is not T.tolist:
        raise TypeError(
            f"can't convert {claim(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )
    note("tolist")


def _backward(tensors: Any, grad_tensors: Any = None, **_: Any) -> None:
    """`torch.autograd.backward`, and `Tensor.backward` of a number."""
    given = tuple(tensors) if isinstance(tensors, list | tuple) else (tensors,)
    gradients = grad_tensors or [None] * len(given)
    _engine_run_backward(
        given,
        tuple(torch.ones_like(x) if g is None else g for x, g in zip(given, gradients, strict=True)),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _made(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that was asked for a device."""
    device = named(kwargs.pop("device"))
    if device == META:
        return func(*args, **kwargs, device=device)
    if func in _FROM_HOST_DATA and args and isinstance(args[0], T):
        return _to(args[0], device, **kwargs)
    if device.type == "cuda" and not STATE.unchecked and (func in _FROM_HOST_DATA or func is T.new_tensor):
        note(func.__name__)
    with unchecked():
        out = func(*args, **kwargs, device=CPU)
    made = tensors_in(out)
    for tensor in made:
        place(tensor, device)
    if not func.__name__.startswith(("empty", "new_empty")):
        launch(func.__name__, writes=made)
    return out


def _to(
    tensor: torch.Tensor, *args: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False, **kwargs: Any
) -> torch.Tensor:
    """`Tensor.to` of any signature."""
    first, rest = (args[0], args[1:]) if args else (None, ())
    if isinstance(first, T):
        device, dtype = claim(first), first.dtype
    elif isinstance(first, torch.dtype):
        dtype = first
    elif first is not None:
        device = first
        if rest and isinstance(rest[0], torch.dtype):
            dtype, rest = rest[0], rest[1:]
    non_blocking = non_blocking or bool(rest and rest[0])
    target = claim(tensor) if device is None else named(device)
    if target == META:
        return T.to(tensor, target, dtype=dtype or tensor.dtype)
    if target != claim(tensor) and not non_blocking:
        note(f"to {target.type}")
    elif target.type == "cuda" and claim(tensor) == CPU and not is_pinned(tensor):
        refuse_pageable()
    out = T.to(tensor, dtype=dtype, **kwargs) if dtype is not None or kwargs else tensor
    return moved(out, target)


def _pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    setattr(tensor.untyped_storage(), PINNED, True)
    return tensor


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return _to(tensor, current() if device is None else device, non_blocking=non_blocking)


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return T.type(tensor, *args, **kwargs)
    name = T.type(tensor)
    return name.replace("torch.", "torch.cuda.", 1) if claim(tensor).type == "cuda" else name


def _product(func: Callable[..., Any], *operands: torch.Tensor, out_dtype: torch.dtype, out: Any = None) -> Any:
    """16-bit operands multiplied into float32, which torch has on CUDA only."""
    result = func(*(operand.to(out_dtype) for operand in operands))
    return result if out is None else out.copy_(result)


_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    T.device.__get__: claim,  # type: ignore[attr-defined]
    T.is_cuda.__get__: lambda tensor: claim(tensor).type == "cuda",  # type: ignore[attr-defined]
    T.is_cpu.__get__: lambda tensor: claim(tensor).type == "cpu",  # type: ignore[attr-defined]
    T.get_device: lambda tensor: -1 if claim(tensor) == CPU else claim(tensor).index,
    T.cuda: _cuda,
    T.cpu: lambda tensor, **_: _to(tensor, CPU),
    T.to: _to,
    T.type: _type,
    T.pin_memory: lambda tensor, *_: _pin(T.clone(tensor)),
    T.is_pinned: lambda tensor, *_: is_pinned(tensor),
}
