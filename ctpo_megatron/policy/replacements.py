"""The functions of megatron-core that are replaced: one row each, with the cause and the reason.

megatron-core 0.16.1 assumes CUDA, Transformer Engine and a fused Adam in a few dozen call sites. A row applies wherever
its cause holds.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils

from ctpo_megatron.policy import cpu_megatron as cpu
from ctpo_megatron.policy.layers import rotate_packed

log = logging.getLogger(__name__)

Cause = Literal["no CUDA", "no Transformer Engine", "torch AdamW", "packed sequences"]

_NO_STREAM = object()


@dataclass(frozen=True)
class _Replacement:
    """absent: the attribute is a name that megatron-core reads but only defines with transformer-engine."""

    cause: Cause
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
            getattr(owner, leaf)  # AttributeError: another version of megatron-core; fail now, not in training
        setattr(owner, leaf, self.value)
        log.debug("%s: %s.%s replaced (%s)", self.cause, self.module, self.attribute, self.reason)


def _causes(cuda: bool) -> dict[Cause, bool]:
    """Which causes hold, according to megatron-core itself."""
    return {
        "no CUDA": not cuda,
        "no Transformer Engine": not hasattr(moe_utils, "te_general_gemm"),
        "torch AdamW": megatron_optimizer.USING_PYTORCH_OPTIMIZER,
        "packed sequences": True,
    }


def _replacements() -> tuple[_Replacement, ...]:
    random, dispatcher = "megatron.core.tensor_parallel.random", "megatron.core.transformer.moe.token_dispatcher"
    return (
        _Replacement(
            "no CUDA", "torch.cuda", "current_device", cpu.current_device, "gradient buffers, RoPE, TP and PP buffers"
        ),
        _Replacement(
            "no CUDA", "torch.cuda", "synchronize", cpu.do_nothing, "variable-length pipelines and checkpoints call it"
        ),
        _Replacement("no CUDA", random, "_get_cuda_rng_state", cpu.rng_state, "activation recompute saves the stream"),
        _Replacement(
            "no CUDA", random, "_set_cuda_rng_state", cpu.set_rng_state, "activation recompute restores the stream"
        ),
        _Replacement(
            "no CUDA", random, "CudaRNGStatesTracker", cpu.rng_tracker(), "sequence parallel forks named streams"
        ),
        _Replacement(
            "no CUDA",
            dispatcher,
            "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
            _NO_STREAM,
            "the dispatcher makes a CUDA stream unless there is one",
        ),
        _Replacement(
            "no CUDA",
            dispatcher,
            "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
            cpu.host_splits,
            "split sizes of the all-to-all have to be on the host",
        ),
        _Replacement(
            "no CUDA",
            mappings.__name__,
            "_gather_along_first_dim",
            cpu.uneven_gather(mappings._gather_along_first_dim),
            "experts under tensor parallelism gather unequal shards",
        ),
        _Replacement(
            "no CUDA",
            mappings.__name__,
            "_reduce_scatter_along_first_dim",
            cpu.uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim),
            "and scatter them again",
        ),
        _Replacement(
            "no Transformer Engine",
            moe_utils.__name__,
            "te_general_gemm",
            None,
            "the router asks whether it is there",
            absent=True,
        ),
        _Replacement(
            "torch AdamW",
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer._set_main_param_and_optimizer_states",
            _set_main_param_and_optimizer_states,
            "a distributed optimizer's checkpoint is loaded into a state that has a `step`",
        ),
        _Replacement(
            "packed sequences",
            "megatron.core.models.common.embeddings.rope_utils",
            "_apply_rotary_pos_emb_thd",
            rotate_packed,
            "the original reads the boundaries back from the device in every layer",
        ),
    )


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


_installed = False


def install(*, cuda: bool) -> None:
    """Replace the functions whose cause holds; once per process, before any Megatron object is built."""
    global _installed
    if _installed:
        return
    causes = _causes(cuda)
    for replacement in _replacements():
        if causes[replacement.cause]:
            replacement.apply()
    _installed = True
