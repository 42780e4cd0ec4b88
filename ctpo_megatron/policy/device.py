"""The only file of the trainer that distinguishes CPU and CUDA: device, backend, and which optional libraries are used.

`install()` and `scope()` let Megatron-Core run on this machine (`replacements.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctpo_megatron.base.installed import TE, is_installed, te_trouble
from ctpo_megatron.policy import replacements
from ctpo_megatron.policy.attention_plan import EXACT, AttentionRules

CUDA = torch.cuda.is_available()
_CPU = torch.device("cpu")

_WIDEST_FLASH_HEAD = 256
"""Numbers of a head that flash attention takes at most."""


@dataclass(frozen=True)
class Capabilities:
    """Optional hardware and libraries of this machine."""

    cuda: bool
    transformer_engine: bool
    packed_attention: bool
    apex: bool
    grad_accumulation_fusion: bool

    def against_te_layers(self, dtype: str) -> str | None:
        """Why transformer-engine's layers cannot train a model of `policy.dtype` here; None if they can.

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
            "RoPE": "TE fused" if te else "unfused",
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


def attention_rules(dtype: torch.dtype, head_dim: int, *, masked: bool) -> AttentionRules:
    """How the local layers call torch's attention. masked: with an explicit mask (context parallelism).

    Fused back ends that take fewer heads of keys than of queries are flash, which takes no mask, and cuDNN. Both are
    for 16 bits (torch 2.13, `sdp_utils.cpp`). Otherwise keys are repeated for the memory-efficient back end: without
    any, torch writes out scores of quadratic size.

    From compute capability 9.0 on torch prefers cuDNN, which compiles a plan for each shape, forward and backward, in
    tens of milliseconds of host time, and keeps all of them. So it is left to calls that flash does not take
    (`enable_cudnn_sdp`), and these are of few different shapes.
    """
    if not CUDA or (dtype is not torch.float32 and not masked and head_dim <= _WIDEST_FLASH_HEAD):
        return EXACT
    grouped = dtype is not torch.float32 and (not masked or _compute_capability() >= (9, 0))
    return AttentionRules(bounded=True, repeat_keys=not grouped)


def max_ranks() -> int:
    """How many ranks this machine can run: its number of GPUs; without GPUs its number of cores, at least four."""
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
    """The precision of matrix products in `policy.dtype`: the dtype, or `tf32`."""
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
    # Not ru_maxrss: on Linux a child inherits its parent's value.
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def transformer_flags(*, te_layers: bool) -> dict[str, Any]:
    """TransformerConfig arguments that follow from the device. te_layers: the layers are Transformer Engine's.

    `batch_p2p_comm=False` everywhere: with interleaved pipelines of two stages the default mixes up messages.
    `deallocate_pipeline_outputs` only on CUDA: gloo may still be reading the freed tensor.
    """
    found = capabilities()
    return {
        "use_cpu_initialization": not CUDA,
        "gradient_accumulation_fusion": found.grad_accumulation_fusion,
        "apply_rope_fusion": te_layers,
        "bias_activation_fusion": CUDA,
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
