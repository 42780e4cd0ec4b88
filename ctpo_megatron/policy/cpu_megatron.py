"""Megatron-Core on machines without CUDA: the functions of it that are replaced, one row each with its reason.

megatron-core 0.16.1 assumes CUDA in a few dozen call sites. `install()` replaces the functions of `_replacements`, and
the mode `CudaRequestsToCpu` answers the remaining CUDA requests (made as arguments of torch calls) with the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_NO_STREAM = object()


class CudaRequestsToCpu(TorchFunctionMode):
    """Answers `device="cuda"`, `pin_memory=True`, `Tensor.cuda()` and `Tensor.type()` as a CUDA machine would.

    `Tensor.type()` is compared with the string 'torch.cuda.FloatTensor' in megatron's gradient clipping and
    optimizers, so the CPU type name is reported in its CUDA spelling.
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


def _cpu_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def _cpu_rng_tracker() -> type:
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


def _set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
    """Restore one parameter's master copy and Adam moments (shadows DistributedOptimizer's method).

    The original copies into every entry of the state, which for torch's AdamW holds a `step` that the checkpoint
    keeps elsewhere (KeyError), and writes in place into a leaf that requires grad.
    """
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    with torch.no_grad():
        main_param.data.copy_(tensors["param"])
        for key, value in self.optimizer.state[main_param].items():
            if key != "step":
                value.copy_(tensors[key])


def _host_splits(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """Give all-to-all its split sizes as numpy arrays (shadows MoEAlltoAllTokenDispatcher's method).

    The original converts CUDA tensors only, on a side stream.
    """
    if point == self.cuda_dtoh_point and not self.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            if isinstance(splits, torch.Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def _uneven_gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gather shards of different sizes by padding them: gloo takes equal ones only. Shadows a function of mappings."""

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


def _uneven_reduce_scatter(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same for the sum that goes back."""

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


@dataclass(frozen=True)
class _Replacement:
    """absent: the attribute is a name that megatron-core reads but only defines with transformer-engine."""

    module: str
    attribute: str
    value: Any
    reason: str
    absent: bool = False

    def apply(self) -> None:
        owner: Any = importlib.import_module(self.module)
        *path, leaf = self.attribute.split(".")
        for name in path:
            owner = getattr(owner, name)
        if not self.absent:
            getattr(owner, leaf)  # AttributeError: the pinned version moved; fail now, not in training
        setattr(owner, leaf, self.value)


def _replacements() -> tuple[_Replacement, ...]:
    from megatron.core.tensor_parallel import mappings

    random, moe = "megatron.core.tensor_parallel.random", "megatron.core.transformer.moe"
    return (
        _Replacement("torch.cuda", "current_device", lambda: _CPU, "gradient buffers, RoPE, TP and PP buffers ask it"),
        _Replacement("torch.cuda", "synchronize", lambda *_: None, "variable-length pipelines and checkpoints call it"),
        _Replacement(random, "_get_cuda_rng_state", _cpu_rng_state, "activation recompute saves the stream"),
        _Replacement(random, "_set_cuda_rng_state", _set_cpu_rng_state, "activation recompute restores the stream"),
        _Replacement(random, "CudaRNGStatesTracker", _cpu_rng_tracker(), "sequence parallel forks named streams"),
        _Replacement(
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer._set_main_param_and_optimizer_states",
            _set_main_param_and_optimizer_states,
            "loading a distributed-optimizer checkpoint with torch AdamW",
        ),
        _Replacement(f"{moe}.moe_utils", "te_general_gemm", None, "the router asks whether it is there", absent=True),
        _Replacement(
            f"{moe}.token_dispatcher",
            "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
            _NO_STREAM,
            "the dispatcher makes a CUDA stream unless there is one",
        ),
        _Replacement(
            f"{moe}.token_dispatcher",
            "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
            _host_splits,
            "split sizes of the all-to-all have to be on the host",
        ),
        _Replacement(
            mappings.__name__,
            "_gather_along_first_dim",
            _uneven_gather(mappings._gather_along_first_dim),
            "experts under tensor parallelism gather unequal shards",
        ),
        _Replacement(
            mappings.__name__,
            "_reduce_scatter_along_first_dim",
            _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim),
            "and scatter them again",
        ),
    )


_installed = False


def install() -> None:
    """Replace the functions, once per process and before anything of Megatron is built."""
    global _installed
    if _installed:
        return
    for replacement in _replacements():
        replacement.apply()
        log.debug("cpu: %s.%s replaced (%s)", replacement.module, replacement.attribute, replacement.reason)
    _installed = True
