"""Checksums of what an engine's worker keeps of each tensor: shards, fused and packed matrices included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from ctpo_megatron.engines.weights.checksums import Part, checksum, sampled_checksum

_GATE_FIRST = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU)
_UP_FIRST = (UnquantizedMoeBackend.FLASHINFER_CUTLASS,)


@dataclass(frozen=True)
class _Piece:
    """Rows `start` to `start + count` of a layer, which are those from `row`, and the columns from `column`, of `name`.

    copy: of tensors that several workers keep, which of these this one is.
    """

    name: str
    start: int
    count: int
    row: int = 0
    column: int = 0
    copy: str = ""


Kept = tuple[str, str, bool, torch.Tensor]
"""A `Part` whose total is still on the device."""


@torch.no_grad()
def kept_parts(model: torch.nn.Module, version: int, dtype: torch.dtype) -> list[Part]:
    """Sums of all that this worker keeps in `dtype` and that can be read back, under the names of the checkpoint."""
    kept = list(_kept(model, version, dtype))
    totals: list[int] = torch.stack([total for *_, total in kept]).tolist()
    return [Part(name, copy, sampled, total) for (name, copy, sampled, _), total in zip(kept, totals, strict=True)]


def _kept(model: torch.nn.Module, version: int, dtype: torch.dtype) -> Iterator[Kept]:
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    seen: dict[int, str] = {}
    for path, module in model.named_modules():
        if any(parameter.dtype != dtype for parameter in module.parameters(recurse=False)):
            continue  # in another precision than the sums: not compared
        if isinstance(module, RoutedExperts):
            yield from _experts(path, module)
        elif isinstance(module, LinearBase):
            for piece in _pieces(path, module, fused):
                yield from _linear(module, piece, version)
        elif isinstance(module, VocabParallelEmbedding):
            path = seen.setdefault(id(module.weight), path)  # a tied head is the embedding
            yield from _vocabulary(path, module, version)
        else:
            for name, parameter in module.named_parameters(path, recurse=False):
                yield name, _rank_of(module), False, checksum(parameter)


def _rank_of(module: torch.nn.Module) -> str:
    from vllm.distributed import get_tensor_model_parallel_rank

    return f"{getattr(module, 'tp_rank', get_tensor_model_parallel_rank())}"


def _pieces(path: str, module: Any, fused: dict[str, list[str]]) -> Iterator[_Piece]:
    parent, _, last = path.rpartition(".")
    names = [f"{parent}.{name}" for name in fused.get(last, [last])]
    rank = module.tp_rank
    if isinstance(module, QKVParallelLinear):
        queries, keys = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        group, copy = divmod(rank, module.num_kv_head_replicas)
        yield _Piece(names[0], 0, queries, rank * queries)
        yield _Piece(names[1], queries, keys, group * keys, copy=str(copy))
        yield _Piece(names[2], queries + keys, keys, group * keys, copy=str(copy))
    elif isinstance(module, MergedColumnParallelLinear):
        start = 0
        for name, size in zip(names, module.output_partition_sizes, strict=True):
            yield _Piece(name, start, size, rank * size)
            start += size
    elif isinstance(module, ColumnParallelLinear):
        size = module.output_size_per_partition
        yield _Piece(names[0], 0, size, rank * size)
    elif isinstance(module, RowParallelLinear):
        yield _Piece(names[0], 0, module.output_size, 0, rank * module.input_size_per_partition)
    else:
        yield _Piece(names[0], 0, module.output_size, copy=str(rank))


def _linear(module: Any, piece: _Piece, version: int) -> Iterator[Kept]:
    rows = slice(piece.start, piece.start + piece.count)
    name = f"{piece.name}.weight"
    if module.weight.numel():
        total = checksum(module.weight[rows], piece.row, piece.column)
        yield name, piece.copy, False, total
    else:  # only CPU kernels pack a matrix so that its parameter is left empty
        from ctpo_megatron.engines.cpu.packed_weights import through_kernel

        columns, matrix = through_kernel(module, piece.column, version)
        yield name, piece.copy, True, sampled_checksum(matrix[rows], columns, piece.row)
    if (bias := getattr(module, "bias", None)) is not None:
        whole = isinstance(module, RowParallelLinear)
        copy = str(module.tp_rank) if whole else piece.copy
        yield f"{piece.name}.bias", copy, False, checksum(bias[rows], piece.row)


def _vocabulary(path: str, module: Any, version: int) -> Iterator[Kept]:
    """A table, and the packed copy of it that an output layer on a CPU multiplies with."""
    shard = module.shard_indices
    rows, first = slice(0, shard.num_org_elements), shard.org_vocab_start_index
    yield f"{path}.weight", type(module).__name__, False, checksum(module.weight[rows], first)
    if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):  # an embedding has one, too: unused
        from ctpo_megatron.engines.cpu.packed_weights import through_kernel

        columns, matrix = through_kernel(module, 0, version)
        yield f"{path}.weight", "packed", True, sampled_checksum(matrix[rows], columns, first)


def _experts(path: str, module: Any) -> Iterator[Kept]:
    backend = module.quant_method.unquantized_backend
    whole = module.local_num_experts == module.global_num_experts
    if not whole or backend not in _GATE_FIRST + _UP_FIRST:
        return  # they count as not compared
    prefix, config = path.removesuffix(".routed_experts"), module.moe_config
    size, rank = config.intermediate_size_per_partition, config.tp_rank
    w13, w2 = _unpacked(module, "w13_weight"), _unpacked(module, "w2_weight")
    halves = [w13[:, :size], w13[:, w13.shape[1] // 2 :][:, :size]]
    gate, up = halves if backend in _GATE_FIRST else reversed(halves)
    for expert in range(module.global_num_experts):
        for name, matrix, row, column in (
            (module.ckpt_gate_proj_name, gate[expert], rank * size, 0),
            (module.ckpt_up_proj_name, up[expert], rank * size, 0),
            (module.ckpt_down_proj_name, w2[expert][:, :size], 0, rank * size),
        ):
            yield f"{prefix}.{expert}.{name}.weight", "", False, checksum(matrix, row, column)


def _unpacked(module: Any, name: str) -> torch.Tensor:
    """All experts' matrices `[E, rows, columns]` in the order of the checkpoint."""
    matrices: torch.Tensor = getattr(module, name)
    if matrices.device.type != "cpu":
        return matrices
    from ctpo_megatron.engines.cpu.packed_weights import unpacked_experts

    return unpacked_experts(module, name)
