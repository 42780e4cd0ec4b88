"""Matrices that vLLM packs for CPU kernels: packed again after a weight update, and read back for checksums."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from ctpo_megatron.engines.weights.checksums import sampled_columns


def pack_again(model: torch.nn.Module) -> None:
    """Pack what vLLM 0.32 packs only when a model is first loaded; called after every weight update."""
    for module in model.modules():
        # A head tied to the embedding receives no weights of its own, so vLLM does not process it again, and it would
        # continue with the packed copy of the previous weights.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        # Experts are not packed again either: the kernels would read the new weights as if they were packed.
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def through_kernel(module: Any, column: int, version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The version's columns that this worker has of a packed matrix: their numbers, and `[rows, columns]`.

    The layer itself multiplies unit vectors, so the result is exact, and is what the layer computes with.
    column: the first one that this worker has.
    """
    width = module.embedding_dim if isinstance(module, VocabParallelEmbedding) else module.input_size
    local = getattr(module, "input_size_per_partition", width)
    columns = sampled_columns(version, width)
    columns = columns[(columns >= column) & (columns < column + local)]
    unit = torch.zeros(len(columns), local, dtype=module.weight.dtype)
    unit[torch.arange(len(columns)), columns - column] = 1.0
    return columns, module.cpu_linear(unit, module.weight, None).T


def unpacked_experts(module: Any, name: str) -> torch.Tensor:
    """All experts' matrices `[E, rows, columns]` of the parameter `name` as they were before they were packed."""
    packed: torch.Tensor = getattr(module, name)
    kernel = module.quant_method.moe_kernel.fused_experts
    if kernel._use_zentorch:  # its kernels take them as they are
        return packed
    experts, rows, columns = packed.shape
    matrices = torch.empty(experts, rows * columns, dtype=packed.dtype)
    matrices[:, _order(rows, columns, packed.dtype, kernel.isa)] = packed.reshape(experts, -1)
    return matrices.view(experts, rows, columns)


@lru_cache(maxsize=8)
def _order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Where each number of a packed matrix was before: the packing of its own numbering, 16 bits at a time."""
    numbers = torch.arange(rows * columns).view(1, rows, columns)
    if dtype == torch.float32:
        packed: torch.Tensor = cpu_prepack_moe_weight(numbers.int().view(dtype), isa)
        return packed.view(torch.int32).flatten().long()
    order = torch.zeros(rows * columns, dtype=torch.int64)
    for shift in (0, 16):
        digits = (numbers >> shift & 0xFFFF).to(torch.uint16).view(dtype)
        order |= cpu_prepack_moe_weight(digits, isa).view(torch.uint16).flatten().long() << shift
    return order
