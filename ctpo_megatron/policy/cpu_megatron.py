"""Megatron-Core on machines without CUDA: substitutes for functions that need it (`replacements.py`).

The mode `CudaRequestsToCpu` redirects the remaining CUDA requests (arguments of torch calls) to the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class CudaRequestsToCpu(TorchFunctionMode):
    """Handles `device="cuda"`, `pin_memory=True`, `Tensor.cuda()` and `Tensor.type()` as on a CUDA machine.

    Megatron's gradient clipping and optimizers compare `Tensor.type()` with 'torch.cuda.FloatTensor', so the CPU type
    name is reported in its CUDA spelling.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            wanted = kwargs.get("device")
            if wanted is not None and torch.device(wanted).type == "cuda":
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def current_device() -> torch.device:
    """The CPU, where megatron-core asks for the current GPU."""
    return _CPU


def do_nothing(*_args: Any) -> None:
    """A synchronisation, of which a CPU has none."""


def rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    """State of the CPU's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    """Inverse of `rng_state`."""
    torch.set_rng_state(state)


def rng_tracker() -> type:
    """Megatron's named random streams, over the CPU's generator."""
    from megatron.core.tensor_parallel import random as mcore_random

    class CpuRNGStatesTracker(mcore_random.CudaRNGStatesTracker):
        """The same named random streams over the CPU generator."""

        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random stream {name!r} or its seed {seed} exists already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = mcore_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"random stream {name!r} was never added")
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    return CpuRNGStatesTracker


def host_splits(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """Give all-to-all its split sizes as numpy arrays (shadows MoEAlltoAllTokenDispatcher's method).

    The original method converts CUDA tensors only, on a side stream.
    """
    if point == self.cuda_dtoh_point and not self.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            if isinstance(splits, torch.Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def uneven_gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gather shards of different sizes by padding them, since gloo needs equal ones. Wraps a function of mappings."""

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def uneven_reduce_scatter(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same for the reduce-scatter of the backward pass."""

    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        padded = input_.new_zeros(len(sizes), max(sizes), *input_.shape[1:])
        for row, part in zip(padded, torch.split(input_, sizes), strict=True):
            row[: part.shape[0]] = part
        mine = torch.empty_like(padded[0])
        torch.distributed.reduce_scatter_tensor(mine, padded.flatten(0, 1), group=group)
        return mine[: sizes[group.rank()]]

    return reduce_scatter
