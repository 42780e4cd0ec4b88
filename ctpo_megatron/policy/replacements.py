"""Functions of megatron-core that are replaced: one row each, with the cause and the reason, and the substitutes.

megatron-core assumes CUDA, Transformer Engine and a fused Adam in a few dozen call sites. The mode
`CudaRequestsToCpu` redirects what then still asks for CUDA (arguments of torch calls), but in passes of the model:
these make too many calls that do not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import distrib_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.distributed.checkpoint import filesystem
from torch.overrides import TorchFunctionMode

from ctpo_megatron.policy import checkpoint_files as files
from ctpo_megatron.policy.layers import rotate_packed, rotate_rows
from ctpo_megatron.policy.megatron_versions import RELEASE, noting_failures, telling_failures

log = logging.getLogger(__name__)

_NO_STREAM = object()

_Replacement = tuple[Any, str, Any, str]
"""Who has the function, its name there, the substitute, and the reason."""


def _replacements(*, cuda: bool) -> Iterator[_Replacement]:
    """Yield the functions whose cause holds, according to megatron-core itself."""
    writer: Any = filesystem_async.FileSystemWriterAsync
    if not cuda:
        yield torch.cuda, "current_device", current_device, "gradient buffers, RoPE, TP and PP buffers"
        yield torch.cuda, "synchronize", no_wait, "variable-length pipelines and checkpoints call it"
        yield schedules, "torch", TorchOfSchedules(), "counts tokens on CUDA"
        yield megatron_random, "_get_cuda_rng_state", rng_state, "activation recompute saves the stream"
        yield megatron_random, "_set_cuda_rng_state", set_rng_state, "activation recompute restores the stream"
        yield megatron_random, "CudaRNGStatesTracker", CpuRNGStatesTracker, "sequence parallel forks named streams"
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        yield dispatcher, "cuda_dtoh_stream", _NO_STREAM, "the dispatcher makes a CUDA stream unless there is one"
        reason = "split sizes of the all-to-all have to be on the host"
        yield dispatcher, "_maybe_dtoh_and_synchronize", host_splits, reason
        gather, scatter = uneven_gather(mappings._gather_along_first_dim), "_reduce_scatter_along_first_dim"
        yield mappings, "_gather_along_first_dim", gather, "experts under tensor parallelism gather unequal shards"
        yield (
            mappings,
            scatter,
            uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim),
            "and scatter them again",
        )
        if RELEASE >= (0, 19):
            yield torch.cuda, "current_stream", no_stream, "gradient reduction waits for CUDA graphs on it"
        reason = "the original imports torch's compiler, to be left out of what it compiles"
        for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
            yield torch.optim.Optimizer, name, getattr(torch.optim.Optimizer, name).__wrapped__, reason
        step: Any = torch.optim.Adam.step
        yield torch.optim.Adam, "step", torch.no_grad()(step.__wrapped__), reason
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        reason = "a distributed optimizer's checkpoint is loaded into a state that has a `step`"
        name = "_set_main_param_and_optimizer_states"
        yield distrib_optimizer.DistributedOptimizer, name, _set_main_param_and_optimizer_states, reason
    reason = "the original reads the boundaries back from the device in every layer"
    yield rope_utils, "_apply_rotary_pos_emb_thd", rotate_packed, reason
    if (fused_packed := rope_utils.fused_apply_rotary_pos_emb_thd) is not None:
        reason = "the original counts positions from the boundaries, and rows of a forest have others"
        rotation = rotate_rows(fused_packed, rope_utils.fused_apply_rotary_pos_emb)
        yield rope_utils, "fused_apply_rotary_pos_emb_thd", rotation, reason
    yield filesystem.FileSystemReader, "read_metadata", files.read_metadata, "the original runs what `.metadata` says"
    if RELEASE >= (0, 19):
        one, several = writer.write_preloaded_data, writer.write_preloaded_data_multithread
        yield writer, "write_preloaded_data", noting_failures(one), "notes why a file could not be written"
        reason = "the original reports the type of a failure alone, or dies of it"
        yield writer, "write_preloaded_data_multithread", telling_failures(several), reason


def _set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
    """Restore one parameter's master copy and Adam moments (shadows DistributedOptimizer's method).

    The original copies into every entry of the state. The state of torch's AdamW has a `step`, which the checkpoint
    stores elsewhere (KeyError). It also writes in place into a leaf that requires grad.
    """
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    with torch.no_grad():
        main_param.data.copy_(tensors["param"])
        for key, value in self.optimizer.state[main_param].items():
            if key != "step":
                value.copy_(tensors[key])


_TE_PRODUCT = getattr(moe_utils, "te_general_gemm", None)
"""The name is undefined where megatron-core finds no Transformer Engine, and its router reads it."""


def route_with_te(te_layers: bool) -> None:
    """Have routers multiply by Transformer Engine's product in its layers, by torch's in local ones.

    megatron-core's router takes whatever is installed, in any layer. Call before a model runs.
    """
    moe_utils.te_general_gemm = _TE_PRODUCT if te_layers else None


_installed = False


def install(*, cuda: bool) -> None:
    """Replace the functions whose cause holds; once per process, before any Megatron object is built."""
    global _installed
    if _installed:
        return
    for owner, name, substitute, reason in _replacements(cuda=cuda):
        getattr(owner, name)  # AttributeError: another version of megatron-core; fail now, not in training
        setattr(owner, name, substitute)
        log.debug("%s.%s replaced (%s)", owner.__name__, name, reason)
    _installed = True


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


class TorchOfSchedules:
    """What megatron-core's schedules have for `torch`: the module, whose `zeros` are on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: object = None, **how: Any) -> torch.Tensor:
        """`torch.zeros` on the CPU, whatever device is named."""
        return torch.zeros(*size, device=_CPU, **how)


def current_device() -> torch.device:
    """Return the CPU, where megatron-core asks for the current GPU."""
    return _CPU


# One function for both would be refused by torch.compile, which has a table of the functions of torch.cuda.
def no_wait(*_args: Any) -> None:
    """Do nothing: a CPU needs no synchronisation."""


def no_stream(*_args: Any) -> None:
    """Do nothing: a CPU has no streams."""


def rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    """State of the CPU's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    """Inverse of `rng_state`."""
    torch.set_rng_state(state)


class CpuRNGStatesTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's named random streams, over the CPU's generator."""

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"random stream {name!r} or its seed {seed} exists already")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"random stream {name!r} was never added")
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


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
    """Return the same for the reduce-scatter of the backward pass."""

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
