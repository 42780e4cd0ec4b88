"""Reads back what a worker of an engine computes with: shards, fused and packed matrices, experts, a tied head.

A run compares what engines receive; this compares what vLLM has made of it, number by number, and so knows how its
layers cut, fuse and pack tensors. `read_back_engine.py` has it done by a real engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Kept:
    """Numbers `[rows, columns]` of a tensor that a worker computes with, from this row and column of the whole."""

    name: str
    numbers: torch.Tensor
    row: int = 0
    column: int = 0


def differences(model: torch.nn.Module, sent: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Return the names of tensors of which a worker's model keeps something else than was sent, or nothing at all."""
    wrong, seen = set[str](), set[str]()
    for kept in _kept(model):
        seen.add(kept.name)
        whole = sent.get(kept.name)
        if whole is None:
            wrong.add(kept.name)
            continue
        matrix, numbers = _matrix(whole), _matrix(kept.numbers)
        rows, columns = numbers.shape
        part = matrix[kept.row : kept.row + rows, kept.column : kept.column + columns]
        if not torch.equal(part.to(numbers.dtype), numbers.cpu()):  # -0.0, which no product has, is equal to 0.0
            wrong.add(kept.name)
    return sorted(wrong), sorted(sent.keys() - seen)


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)


@torch.no_grad()
def _kept(model: torch.nn.Module) -> Iterator[Kept]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    tied: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield from _experts(path, module)
        elif isinstance(module, LinearBase):
            for piece in _pieces(path, module, fused):
                yield from _linear(module, piece)
        elif isinstance(module, VocabParallelEmbedding):
            path = tied.setdefault(id(module.weight), path)  # a tied head is the embedding
            yield from _vocabulary(path, module)
        else:
            for name, parameter in module.named_parameters(path, recurse=False):
                yield Kept(name, parameter)


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `start + count` of a layer: those from `row`, and the columns from `column`, of tensor `name`."""

    name: str
    start: int
    count: int
    row: int = 0
    column: int = 0


def _pieces(path: str, module: Any, fused: dict[str, list[str]]) -> Iterator[Piece]:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    parent, _, last = path.rpartition(".")
    names = [f"{parent}.{name}" for name in fused.get(last, [last])]
    rank = module.tp_rank
    if isinstance(module, QKVParallelLinear):
        queries, keys = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        group = rank // module.num_kv_head_replicas
        yield Piece(names[0], 0, queries, rank * queries)
        yield Piece(names[1], queries, keys, group * keys)
        yield Piece(names[2], queries + keys, keys, group * keys)
    elif isinstance(module, MergedColumnParallelLinear):
        start = 0
        for name, size in zip(names, module.output_partition_sizes, strict=True):
            yield Piece(name, start, size, rank * size)
            start += size
    elif isinstance(module, ColumnParallelLinear):
        size = module.output_size_per_partition
        yield Piece(names[0], 0, size, rank * size)
    elif isinstance(module, RowParallelLinear):
        yield Piece(names[0], 0, module.output_size, 0, rank * module.input_size_per_partition)
    else:
        yield Piece(names[0], 0, module.output_size)


def _linear(module: Any, piece: Piece) -> Iterator[Kept]:
    # Only CPU kernels pack a matrix so that its parameter is left empty.
    matrix = module.weight if module.weight.numel() else _through_kernel(module)
    rows = slice(piece.start, piece.start + piece.count)
    yield Kept(f"{piece.name}.weight", matrix[rows], piece.row, piece.column)
    if (bias := getattr(module, "bias", None)) is not None:
        yield Kept(f"{piece.name}.bias", bias[rows], piece.row)


def _vocabulary(path: str, module: Any) -> Iterator[Kept]:
    """A table, and the packed copy of it that an output layer on a CPU multiplies with."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    shard = module.shard_indices
    rows, first = slice(0, shard.num_org_elements), shard.org_vocab_start_index
    yield Kept(f"{path}.weight", module.weight[rows], first)
    if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):  # an embedding has one, too: unused
        yield Kept(f"{path}.weight", _through_kernel(module)[rows], first)


def _through_kernel(module: Any) -> torch.Tensor:
    """Return the packed matrix as the layer computes with it: multiplied by unit vectors, which is exact."""
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    unit = torch.eye(width or module.embedding_dim, dtype=module.weight.dtype)
    product: torch.Tensor = module.cpu_linear(unit, module.weight, None)
    return product.T


def _experts(path: str, module: Any) -> Iterator[Kept]:
    """What vLLM's backends of this kind keep; experts that are spread over workers count as not compared."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend as Backend

    gate_first, up_first = (Backend.TRITON, Backend.BATCHED_TRITON, Backend.CPU), (Backend.FLASHINFER_CUTLASS,)
    backend = module.quant_method.unquantized_backend
    if module.local_num_experts != module.global_num_experts or backend not in gate_first + up_first:
        return
    prefix, config = path.removesuffix(".routed_experts"), module.moe_config
    size, rank = config.intermediate_size_per_partition, config.tp_rank
    w13, w2 = _unpacked(module, "w13_weight"), _unpacked(module, "w2_weight")
    halves = [w13[:, :size], w13[:, w13.shape[1] // 2 :][:, :size]]
    gate, up = halves if backend in gate_first else reversed(halves)
    for expert in range(module.global_num_experts):
        name = f"{prefix}.{expert}"
        yield Kept(f"{name}.{module.ckpt_gate_proj_name}.weight", gate[expert], rank * size)
        yield Kept(f"{name}.{module.ckpt_up_proj_name}.weight", up[expert], rank * size)
        yield Kept(f"{name}.{module.ckpt_down_proj_name}.weight", w2[expert][:, :size], 0, rank * size)


def _unpacked(module: Any, name: str) -> torch.Tensor:
    """Return all experts' matrices `[E, rows, columns]` as they were before a CPU kernel packed them."""
    packed: torch.Tensor = getattr(module, name)
    kernel = module.quant_method.moe_kernel.fused_experts
    if packed.device.type != "cpu" or kernel._use_zentorch:  # its kernels take them as they are
        return packed
    experts, rows, columns = packed.shape
    matrices = torch.empty(experts, rows * columns, dtype=packed.dtype)
    matrices[:, _order(rows, columns, packed.dtype, kernel.isa)] = packed.reshape(experts, -1)
    return matrices.view(experts, rows, columns)


@lru_cache(maxsize=8)
def _order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Return where each number of a packed matrix was before: the packing of its own numbering, 16 bits at a time."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(rows * columns).view(1, rows, columns)
    if dtype == torch.float32:
        packed: torch.Tensor = cpu_prepack_moe_weight(numbers.int().view(dtype), isa)
        return packed.view(torch.int32).flatten().long()
    order = torch.zeros(rows * columns, dtype=torch.int64)
    for shift in (0, 16):
        digits = (numbers >> shift & 0xFFFF).to(torch.uint16).view(dtype)
        order |= cpu_prepack_moe_weight(digits, isa).view(torch.uint16).flatten().long() << shift
    return order
