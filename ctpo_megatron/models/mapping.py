"""Conversion between a Megatron parameter and the Hugging Face tensors that it contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ctpo_megatron.models.spec import ModelSpec

if TYPE_CHECKING:  # torch is needed only with tensors, and is imported then
    import torch

    Tensors = list[torch.Tensor]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParamMapping:
    """A Megatron parameter, and the Hugging Face tensors it contains.

    megatron: its names, in the local layers and in Transformer Engine's. hf: names of the tensors, with `shapes`. If
    `per_expert`, `{expert}` is the index of an expert: on this rank, and in the whole model.
    shard: full HF tensors -> one shard per tensor-parallel rank; unshard: one shard -> its part of each HF tensor.
    dim: the dimension along which the parts of all ranks are concatenated; None: replicated. padded: the joined tensor
    has padding rows after the vocabulary.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    shard: Callable[[Tensors, ModelSpec, int], Tensors]
    unshard: Callable[[torch.Tensor, ModelSpec], Tensors]
    dim: int | None
    per_expert: bool = False
    padded: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of all its tensors."""
        return sum(map(prod, self.shapes))

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies the hidden states of a token."""
        return len(self.shapes[0]) == 2


def replicated(megatron: Sequence[str], hf: str, shape: Shape) -> ParamMapping:
    """Return a replicated tensor, e.g. the weight of a norm."""
    return ParamMapping(tuple(megatron), (hf,), (shape,), _copies, _whole, None)


def row_parallel(megatron: Sequence[str], hf: str, shape: Shape, *, per_expert: bool = False) -> ParamMapping:
    """Return a matrix `[out, in]` split along `in`."""
    return ParamMapping(tuple(megatron), (hf,), (shape,), _by_input, _whole, 1, per_expert)


def vocabulary(megatron: str, hf: str, shape: Shape) -> ParamMapping:
    """Return a matrix `[vocabulary, hidden]` split along its padded rows."""
    return ParamMapping((megatron,), (hf,), (shape,), shard_vocabulary, _whole, 0, padded=True)


def query_key_value(megatron: str, hf: Sequence[str], shapes: Sequence[Shape]) -> ParamMapping:
    """Weights or biases of queries, keys and values, in Megatron one tensor, interleaved by key-value group."""
    return ParamMapping((megatron,), tuple(hf), tuple(shapes), _shard_qkv, _unshard_qkv, 0)


def gate_and_up(
    megatron: Sequence[str], hf: Sequence[str], shapes: Sequence[Shape], *, per_expert: bool = False
) -> ParamMapping:
    """Return the two input matrices of a gated MLP, in Megatron one tensor, the gate's rows first on every rank."""
    return ParamMapping(tuple(megatron), tuple(hf), tuple(shapes), _shard_gate_up, _halves, 0, per_expert)


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Vocabulary rows that Megatron holds: the next multiple of 128 x tensor-parallel size."""
    multiple = 128 * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def shard_vocabulary(tensors: Tensors, spec: ModelSpec, tp: int) -> Tensors:
    """Rows `[V, H]` -> shards `[V_padded / tp, H]`, padded with zeros."""
    import torch.nn.functional as F

    (weight,) = tensors
    rows = padded_vocabulary(weight.shape[0], tp)
    return list(F.pad(weight, (0, 0, 0, rows - weight.shape[0])).chunk(tp, dim=0))


def _copies(tensors: Tensors, spec: ModelSpec, tp: int) -> Tensors:
    return tensors * tp


def _by_input(tensors: Tensors, spec: ModelSpec, tp: int) -> Tensors:
    return list(tensors[0].chunk(tp, dim=1))


def _whole(shard: torch.Tensor, spec: ModelSpec) -> Tensors:
    return [shard]


def _shard_qkv(tensors: Tensors, spec: ModelSpec, tp: int) -> Tensors:
    """q, k, v -> per key-value group: its query heads, its key head, its value head (Megatron's interleaving)."""
    import torch

    groups, d = spec.num_key_value_heads, spec.head_dim
    packed = torch.cat([t.reshape(groups, -1, d, *t.shape[1:]) for t in tensors], dim=1)
    return list(packed.flatten(0, 2).chunk(tp, dim=0))


def _unshard_qkv(shard: torch.Tensor, spec: ModelSpec) -> Tensors:
    import torch

    d, queries = spec.head_dim, spec.num_attention_heads // spec.num_key_value_heads
    by_group = shard.reshape(-1, queries + 2, d, *shard.shape[1:])
    return [part.flatten(0, 2) for part in torch.split(by_group, [queries, 1, 1], dim=1)]


def _shard_gate_up(tensors: Tensors, spec: ModelSpec, tp: int) -> Tensors:
    import torch

    gate, up = (t.chunk(tp, dim=0) for t in tensors)
    return [torch.cat(pair) for pair in zip(gate, up, strict=True)]


def _halves(shard: torch.Tensor, spec: ModelSpec) -> Tensors:
    return list(shard.chunk(2, dim=0))
