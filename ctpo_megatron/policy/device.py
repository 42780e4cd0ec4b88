"""The only file of the trainer that distinguishes CPU and CUDA: device, its memory, and which libraries are used.

`install()` and `scope()` let Megatron-Core run on this machine (`replacements.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ctpo_megatron.base.installed import TE, is_installed, te_trouble
from ctpo_megatron.policy import replacements
from ctpo_megatron.policy.megatron_import import CUDA as CUDA

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer

    from ctpo_megatron.config import PolicyConfig
    from ctpo_megatron.policy.model import BuiltModel

_CPU = torch.device("cpu")
SLAB_BYTES = 1 << 28
"""torch rounds pinned memory up to a power of two: one buffer for each tensor would take up to twice as much."""


@dataclass(frozen=True)
class Capabilities:
    """Optional hardware and libraries of this machine."""

    cuda: bool
    transformer_engine: bool
    packed_attention: bool
    apex: bool
    grad_accumulation_fusion: bool

    def against_te_layers(self, dtype: str) -> str | None:
        """Return why transformer-engine's layers cannot train a model of `policy.dtype` here; None if they can.

        Their attention supports packed sequences in 16-bit precision only, with cuDNN from compute capability 9.0 on or
        with flash-attn (transformer-engine 2.9 to 2.11, `dot_product_attention/utils.py`). Without either it raises, or
        materialises the whole score matrix.
        """
        if not self.transformer_engine:
            absent = "Transformer Engine with CUDA was not found; install it (docs/install_cuda.md)"
            return str(te_trouble() or absent)
        if dtype == "float32":
            return f"Transformer Engine has no packed attention in {dtype}"
        if not self.packed_attention:
            return "Transformer Engine's packed attention needs flash-attn on GPUs before capability 9.0; install it"
        return None

    @property
    def adam(self) -> str:
        """The Adam that megatron.core.optimizer selects: transformer-engine's, else apex's, else torch's."""
        return "TE FusedAdam" if self.transformer_engine else "apex FusedAdam" if self.apex else "torch AdamW"

    def describe(self, layer_spec: str, dtype: str) -> str:
        """Log lines: which implementations a run with `policy.layer_spec` and `policy.dtype` uses."""
        against = self.against_te_layers(dtype) if layer_spec != "local" else None
        te = layer_spec != "local" and against is None
        by_length = "torch scaled_dot_product_attention, by sequence length"
        fusion = "apex, in backward" if self.grad_accumulation_fusion else "off, a separate addition"
        lines = {
            "device": "cuda, collectives: nccl" if self.cuda else "cpu, collectives: gloo",
            "attention": "TE fused" if te else f"{by_length} ({against})" if against and self.cuda else by_length,
            "norms": "TE RMSNorm, fused with the projections" if te else "torch RMSNorm",
            "RoPE": "TE fused" if te else "ctpo_kernels",
            "Adam": self.adam,
            "gradient accumulation fusion": fusion,
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _compute_capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if CUDA else (0, 0)


def capabilities() -> Capabilities:
    """Look for CUDA, transformer-engine, flash-attn and apex without importing them."""
    return Capabilities(
        cuda=CUDA,
        transformer_engine=CUDA and is_installed(TE) and not te_trouble(),
        packed_attention=CUDA and (_compute_capability() >= (9, 0) or is_installed("flash_attn")),
        # An unrelated package on PyPI is also called apex; only NVIDIA's has the extension module amp_C.
        apex=CUDA and is_installed("apex") and is_installed("amp_C"),
        grad_accumulation_fusion=CUDA and is_installed("fused_weight_gradient_mlp_cuda"),
    )


def max_ranks() -> int:
    """Return how many ranks this machine can run: its number of GPUs; without GPUs its number of cores, at
    least four.
    """
    return torch.cuda.device_count() if CUDA else max(4, os.cpu_count() or 1)


def local_device(local_rank: int) -> torch.device:
    """Select and return the device of this rank. Raises RuntimeError when this node has too few GPUs."""
    if not CUDA:
        return _CPU
    if local_rank >= (found := torch.cuda.device_count()):
        raise RuntimeError(
            f"rank {local_rank} of this node has no GPU: {found} are visible; start at most {found} per node"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def device_name() -> str | None:
    """Product name of this rank's GPU; None on a CPU."""
    return torch.cuda.get_device_name() if CUDA else None


def gpu_bytes() -> int | None:
    """Bytes of this rank's GPU; None on a CPU."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) if CUDA else None


def product_precision(dtype: str) -> str:
    """Return the precision of matrix products in `policy.dtype`: the dtype, or `tf32`."""
    return "tf32" if CUDA and dtype == "float32" and torch.backends.cuda.matmul.allow_tf32 else dtype


def release_cached_memory() -> None:
    """Return torch's cache of freed GPU memory to the driver, for other processes."""
    if CUDA:
        # They lie within large blocks and would keep these: 0.6 GiB on an H200. The next product makes them again.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for all streams, so that a clock read next includes the queued work and any stream may read its results."""
    if CUDA:
        torch.cuda.synchronize()


def gather_in_place(out: torch.Tensor, part: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """All-gather `part` of every rank into `out` `[ranks, *part.shape]` without extra memory; collective."""
    if CUDA:
        torch.distributed.all_gather_into_tensor(out, part.contiguous(), group=group)
        return
    for rank, source in enumerate(torch.distributed.get_process_group_ranks(group)):
        if rank == group.rank():
            out[rank].copy_(part)
        # gloo's all-gather would hold a second copy of everything.
        torch.distributed.broadcast(out[rank], src=source, group=group)


def peak_memory_mib() -> float:
    """Peak memory of this process since its start, in MiB: of torch's tensors on a GPU, resident memory on a CPU."""
    if CUDA:
        return torch.cuda.max_memory_allocated() / 2**20
    # Not ru_maxrss: a child inherits its parent's value.
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10  # type: ignore[index]


def transformer_flags(*, te_layers: bool, experts: bool) -> dict[str, Any]:
    """TransformerConfig arguments that follow from the device. te_layers: the layers are Transformer Engine's.

    experts: of a mixture, whose SwiGLU with the weight of each token torch compiles, as it does in Transformer Engine's
    layers. `use_te_activation_func` has a dense local MLP call `swiglu` of ours (`layers.activate_at_once`).

    `batch_p2p_comm=False` everywhere: with interleaved pipelines of two stages the default mixes up messages.
    `deallocate_pipeline_outputs` only on CUDA: gloo may still be reading the freed tensor.
    """
    found = capabilities()
    compiled = te_layers or experts
    return {
        "use_cpu_initialization": not CUDA,
        "gradient_accumulation_fusion": found.grad_accumulation_fusion,
        "apply_rope_fusion": te_layers,
        "bias_activation_fusion": CUDA and compiled,
        "use_te_activation_func": CUDA and not compiled,
        "bias_dropout_fusion": CUDA,
        "masked_softmax_fusion": False,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": CUDA,
    }


def scope() -> AbstractContextManager[Any]:
    """Wrap every call into megatron-core in this context, but for its schedules. It is thread-local, hence per call.

    On a CPU it looks at every call of torch, which takes a fifth of the time of a small model's passes.
    """
    return contextlib.nullcontext() if CUDA else replacements.CudaRequestsToCpu()


def install() -> None:
    """Patch megatron-core for this machine; call once per process before building anything."""
    replacements.install(cuda=CUDA)


class DeviceMemory:
    """`policy.offload`: optimizer state (and parameters) move to host memory, gradient buffers are freed.

    Only state that the distributed optimizer holds separately from the parameters can move: master weights and moments
    of a 16-bit model. Methods may be called at any time. The optimizer's own `offload_to_cpu` takes new pageable memory
    each time, at 2 GB/s on an H200 (benchmarks/results/gpu/nvidia-h200.md). Parameter buffers pin theirs whole, which
    torch rounds up to a power of two. Here tensors move through slabs of pinned memory, which are kept.
    """

    def __init__(self, config: PolicyConfig, model: BuiltModel) -> None:
        self._what = config.offload
        self._model = model
        self._released = False
        self._slabs: list[torch.Tensor] = []
        self._taken: list[tuple[torch.UntypedStorage, int]] = []  # and its bytes

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold everything on the device in a context, for passes of the model. Does not nest."""
        with scope():
            self._reclaim()
        yield

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """As `on_device`, and all of megatron-core can be called."""
        with self.on_device(), scope():
            yield

    @contextmanager
    def weights_complete(self) -> Iterator[None]:
        """As `in_use`, with every parameter complete for readers on any stream.

        Only the current stream waits for the gather of `overlap_param_gather`, and vLLM's NCCL producer reads on
        streams of its own. The same holds for the copies of a reclaim.
        """
        with self.in_use():
            self._model.finish_param_gather()
            synchronize()
            yield

    def release(self, optimizer: ChainedOptimizer | None) -> None:
        """Release the memory, after any unfinished gather of parameters. optimizer: the current one, if any.

        Raises MemoryError when the host has no more to pin; then all stays on the device.
        """
        if self._what == "none" or self._released:
            return
        with scope():
            self._model.finish_param_gather()
            self._take([*self._parameters(), *(_tensors(optimizer) if optimizer is not None else ())])
            for chunk in self._model.wrapped:
                chunk.offload_grad_buffers()
            release_cached_memory()
        self._released = True

    def _reclaim(self) -> None:
        """Move everything back to the device, on the current stream. Gradients are zero."""
        if not self._released:
            return
        for storage, size in self._taken:
            storage.resize_(size)
        for there, here in self._pieces(self._taken):
            there.copy_(here, non_blocking=True)
        self._taken = []
        for chunk in self._model.wrapped:
            chunk.restore_grad_buffers()
        self._released = False

    def _take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy to the host and free the device memory; returns when both are done.

        A tensor that shares its storage stays where it is, or the others would lose theirs.
        """
        taken = [(each.untyped_storage(), each.untyped_storage().nbytes()) for each in tensors if _is_whole(each)]
        for there, here in self._pieces(taken):
            here.copy_(there, non_blocking=True)
        synchronize()
        for storage, _ in taken:
            storage.resize_(0)
        self._taken = taken

    def _pieces(self, taken: Sequence[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes on the device, and their place on the host."""
        offset = 0
        for storage, size in taken:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < size:
                number, at = divmod(offset, SLAB_BYTES)
                if number == len(self._slabs):
                    self._slabs.append(self._slab())
                count = min(size - start, SLAB_BYTES - at)
                yield whole[start : start + count], self._slabs[number][at : at + count]
                start, offset = start + count, offset + count

    def _slab(self) -> torch.Tensor:
        try:
            return torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=CUDA)
        except RuntimeError as error:
            raise MemoryError(
                f"policy.offload: no more pinned host memory after {len(self._slabs) * SLAB_BYTES >> 20} MiB of this "
                f"rank ({error}); give the job more memory, or set policy.offload=none"
            ) from error

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Buffers that the parameters are views of, as far as they move."""
        if self._what == "all":
            for chunk in self._model.wrapped:
                yield from (buffer.param_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)


def _tensors(optimizer: ChainedOptimizer) -> Iterator[torch.Tensor]:
    """Master weights and moments on the device."""
    for each in optimizer.chained_optimizers:
        if (inner := each.optimizer) is None or each.is_stub_optimizer:  # a rank without parameters of this kind
            continue
        for group in inner.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.is_cuda)
        for state in inner.state.values():
            # Not `step`: one number for each parameter is not worth a copy each.
            yield from (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state and state[name].is_cuda)


def _is_whole(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.numel() * tensor.element_size() > 0
