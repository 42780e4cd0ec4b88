"""The only file of the trainer that knows CPU from CUDA: device, backend, library choices, and CPU accommodation.

megatron-core 0.16.1 assumes CUDA in a few dozen call sites. On a machine without CUDA `install()` replaces the
functions listed in `_cpu_replacements`, one row each with its reason, and `scope()` answers the remaining CUDA
requests (made as arguments of torch calls) with the CPU. With CUDA both do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

CUDA = torch.cuda.is_available()
BACKEND = "nccl" if CUDA else "gloo"
_CPU = torch.device("cpu")
_NO_STREAM = object()


@dataclass(frozen=True)
class Capabilities:
    """What the machine offers beyond megatron-core itself."""

    cuda: bool
    transformer_engine: bool
    packed_attention: bool
    apex: bool
    grad_accumulation_fusion: bool

    def layer_spec(self, dtype: str) -> str:
        """The layer spec that `policy.layer_spec: auto` stands for in a model of `policy.dtype`."""
        return "local" if self.against_te_layers(dtype) else "transformer_engine"

    def against_te_layers(self, dtype: str) -> str | None:
        """Why transformer-engine's layers cannot train a model of `policy.dtype` here; None if they can.

        Its attention takes packed sequences in 16-bit precision only, by cuDNN from compute capability 9.0 on or by
        flash-attn (transformer-engine 2.9 to 2.11, `dot_product_attention/utils.py`). Without either it raises, or
        falls back to scores of quadratic size.
        """
        if not self.transformer_engine:
            return "Transformer Engine with CUDA was not found; install it (docs/policy.md)"
        if dtype != "bfloat16":
            return f"Transformer Engine has no packed attention in {dtype}"
        if not self.packed_attention:
            return "Transformer Engine's packed attention needs flash-attn on GPUs before capability 9.0; install it"
        return None

    @property
    def adam(self) -> str:
        """The Adam that megatron.core.optimizer picks: transformer-engine's before apex's before torch's."""
        return "TE FusedAdam" if self.transformer_engine else "apex FusedAdam" if self.apex else "torch AdamW"

    def describe(self, layer_spec: str, dtype: str) -> str:
        """Lines for the log: which implementation of what a run with `policy.layer_spec` and `policy.dtype` uses."""
        against = self.against_te_layers(dtype) if layer_spec != "local" else None
        te = layer_spec != "local" and against is None
        by_length = "torch scaled_dot_product_attention, by sequence length"
        fusion = "apex, in backward" if self.grad_accumulation_fusion else "off, a separate addition"
        lines = {
            "device": f"{'cuda' if self.cuda else 'cpu'}, collectives: {BACKEND}",
            "attention": "TE fused" if te else f"{by_length} ({against})" if against and self.cuda else by_length,
            "norms": "TE RMSNorm, fused with the projections" if te else "torch RMSNorm",
            "RoPE": "TE fused" if self.transformer_engine else "megatron-core, unfused",
            "Adam": self.adam,
            "gradient accumulation fusion": fusion,
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _installed_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _compute_capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if CUDA else (0, 0)


def capabilities() -> Capabilities:
    """Look for CUDA, transformer-engine, flash-attn and apex without importing them."""
    return Capabilities(
        cuda=CUDA,
        transformer_engine=CUDA and _installed_module("transformer_engine"),
        packed_attention=CUDA and (_compute_capability() >= (9, 0) or _installed_module("flash_attn")),
        # An unrelated package on PyPI is called apex too; amp_C is the extension module that only NVIDIA's has.
        apex=CUDA and _installed_module("apex") and _installed_module("amp_C"),
        grad_accumulation_fusion=CUDA and _installed_module("fused_weight_gradient_mlp_cuda"),
    )


def max_ranks() -> int:
    """How many ranks this machine runs at once: one a GPU; on CPUs one a core, and four of small models anywhere."""
    return torch.cuda.device_count() if CUDA else max(4, os.cpu_count() or 1)


def local_device(local_rank: int) -> torch.device:
    """The device of this rank; selects it on CUDA. Raises RuntimeError when this node has no GPU left for it."""
    if not CUDA:
        return _CPU
    if local_rank >= (found := torch.cuda.device_count()):
        raise RuntimeError(
            f"rank {local_rank} of this node has no GPU: {found} are visible; start at most {found} a node"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def device_name() -> str | None:
    """Product name of this rank's GPU; None on a CPU."""
    return torch.cuda.get_device_name() if CUDA else None


def product_precision(dtype: str) -> str:
    """What matrix products of `policy.dtype` run in: the dtype, or `tf32`."""
    return "tf32" if CUDA and dtype == "float32" and torch.backends.cuda.matmul.allow_tf32 else dtype


def release_cached_memory() -> None:
    """Give what torch keeps of freed GPU memory back to the driver, where other processes can have it."""
    if CUDA:
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device, so that a clock read next has seen the work queued so far."""
    if CUDA:
        torch.cuda.synchronize()


def gather_in_place(out: torch.Tensor, part: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """All-gather `part` of every rank into `out` `[ranks, *part.shape]` with no memory besides; collective."""
    if CUDA:
        torch.distributed.all_gather_into_tensor(out, part.contiguous(), group=group)
        return
    for rank, source in enumerate(torch.distributed.get_process_group_ranks(group)):
        if rank == group.rank():
            out[rank].copy_(part)
        # gloo's all-gather would hold everything a second time.
        torch.distributed.broadcast(out[rank], src=source, group=group)


def peak_memory_mib() -> float:
    """Most memory that this process has held since it began, in MiB: in torch's tensors on a GPU, resident on a CPU."""
    if CUDA:
        return torch.cuda.max_memory_allocated() / 2**20
    # ru_maxrss would do, but on Linux a child starts with its parent's.
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def transformer_flags() -> dict[str, Any]:
    """TransformerConfig arguments that follow from the device.

    `batch_p2p_comm=False` everywhere: with interleaved pipelines of two stages its default mixes up messages.
    `deallocate_pipeline_outputs` only on CUDA: gloo may still be reading the tensor that it frees.
    """
    found = capabilities()
    return {
        "use_cpu_initialization": not CUDA,
        "gradient_accumulation_fusion": found.grad_accumulation_fusion,
        "apply_rope_fusion": found.transformer_engine,
        "bias_activation_fusion": CUDA,
        "bias_dropout_fusion": CUDA,
        "masked_softmax_fusion": False,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": CUDA,
    }


class _CudaRequestsToCpu(TorchFunctionMode):
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


def scope() -> AbstractContextManager[Any]:
    """Enter around every call into megatron-core. The underlying mode is thread-local: enter it per call."""
    return contextlib.nullcontext() if CUDA else _CudaRequestsToCpu()


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
        for row, part in zip(padded, input_.split(sizes), strict=True):
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
            getattr(
                owner, leaf
            )  # an AttributeError here means that the pinned version moved: fail now, not in training
        setattr(owner, leaf, self.value)


def _cpu_replacements() -> tuple[_Replacement, ...]:
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
    """Make megatron-core run on this machine; call once per process before building anything. Nothing on CUDA."""
    global _installed
    if CUDA or _installed:
        return
    for replacement in _cpu_replacements():
        replacement.apply()
        log.debug("cpu: %s.%s replaced (%s)", replacement.module, replacement.attribute, replacement.reason)
    _installed = True
