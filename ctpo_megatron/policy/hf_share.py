"""What each rank sends to the engines: all ranks that have a tensor send some of its rows, and equally many bytes.

A rank sends rows of its own tensor-parallel shard where the shard is made of rows, so that nothing is gathered. Of
other tensors each rank of a tensor-parallel group sends an equal part of the rows. Replicas (data- and
context-parallel) have the same shards. They cut these, one after another, into stretches of equal size, one for each
replica. The stretches of a pipeline stage and, for experts, of an expert-parallel rank are cut separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu

from ctpo_megatron.base.tensor_rows import TensorRows, rows_of
from ctpo_megatron.models import ModelSpec, padded_vocabulary
from ctpo_megatron.policy.hf import ModelParameter, entries, joined
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.parallel import Layout


class Rows(NamedTuple):
    """A range of rows of a whole tensor."""

    first: int
    end: int


@dataclass(frozen=True)
class _Tensor:
    """A Hugging Face tensor of a parameter, of which it is number `number`."""

    entry: ModelParameter
    number: int
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.mapping.shapes[self.number]

    @property
    def row_bytes(self) -> int:
        return TensorRows.whole(self.name, self.shape, self.entry.parameter.dtype).row_bytes

    def of_shard(self, rank: int, spec: ModelSpec) -> Rows:
        """Its rows on a rank of the tensor-parallel group; of a tensor that is not cut by rows, an equal part."""
        mapping, size, rows = self.entry.mapping, self.entry.group.size(), rows_of(self.shape)
        if mapping.dim != 0:
            return Rows(rows * rank // size, rows * (rank + 1) // size)
        each = (padded_vocabulary(rows, size) if mapping.padded else rows) // size
        return Rows(min(rank * each, rows), min((rank + 1) * each, rows))

    def rows(self, own: Rows) -> TensorRows:
        """As they are announced and sent."""
        return TensorRows(self.name, self.shape, self.entry.parameter.dtype, own.first, own.end - own.first)


@dataclass(frozen=True)
class _Sending:
    """What this rank sends of a tensor. needed: whether a rank of its tensor-parallel group sends something of it."""

    tensor: _Tensor
    own: Rows
    needed: bool


def cut(shard: Sequence[Rows], row_bytes: Sequence[int], replica: int, replicas: int) -> list[Rows]:
    """The rows that one of several replicas sends of each tensor in a shard: a stretch of all bytes, to the row."""
    total = sum((rows.end - rows.first) * each for rows, each in zip(shard, row_bytes, strict=True))
    start, end = total * replica // replicas, total * (replica + 1) // replicas
    found, passed = [], 0
    for rows, each in zip(shard, row_bytes, strict=True):
        first, last = (min(max(-(-(at - passed) // each), 0), rows.end - rows.first) for at in (start, end))
        found.append(Rows(rows.first + first, rows.first + last))
        passed += (rows.end - rows.first) * each
    return found


def _pieces(model: BuiltModel, layout: Layout) -> list[list[_Sending]]:
    """One list for each parameter of this rank."""
    experts_each = model.spec.num_experts // layout.ep_size
    tensors = [
        _Tensor(entry, number, name)
        for entry in entries(model)
        for number, name in enumerate(entry.names(experts_each, layout.ep_rank))
    ]
    found: dict[tuple[int, int], _Sending] = {}
    for per_expert in (False, True):
        members = [tensor for tensor in tensors if tensor.entry.mapping.per_expert == per_expert]
        found |= _shared_out(members, model.spec, _replica(per_expert=per_expert))
    by_parameter: dict[int, list[_Sending]] = {}
    for tensor in tensors:
        parameter = id(tensor.entry.parameter)
        by_parameter.setdefault(parameter, []).append(found[parameter, tensor.number])
    return list(by_parameter.values())


def _shared_out(
    tensors: Sequence[_Tensor], spec: ModelSpec, replica: tuple[int, int]
) -> dict[tuple[int, int], _Sending]:
    """By parameter and number; all tensors are of the same ranks."""
    if not tensors:
        return {}
    group, row_bytes = tensors[0].entry.group, [tensor.row_bytes for tensor in tensors]
    of_ranks = [
        cut([tensor.of_shard(rank, spec) for tensor in tensors], row_bytes, *replica) for rank in range(group.size())
    ]
    needed = [any(rows.first < rows.end for rows in of_tensor) for of_tensor in zip(*of_ranks, strict=True)]
    return {
        (id(tensor.entry.parameter), tensor.number): _Sending(tensor, own, wanted)
        for tensor, own, wanted in zip(tensors, of_ranks[group.rank()], needed, strict=True)
    }


def _replica(*, per_expert: bool) -> tuple[int, int]:
    """Number of this replica, and how many there are; CP ranks count as replicas, too."""
    if per_expert:
        return mpu.get_expert_data_parallel_rank(), mpu.get_expert_data_parallel_world_size()
    ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)
    return mpu.get_data_parallel_rank(with_context_parallel=True), ranks


def export_share(model: BuiltModel, layout: Layout) -> Iterator[tuple[TensorRows, torch.Tensor]]:
    """Yield what this rank is to send, one tensor's rows at a time; each row is sent by one rank only.

    A tensor that is cut along another dimension than its rows is gathered, in the replica that sends some of it. All
    ranks must iterate to the end.
    """
    for pieces in _pieces(model, layout):
        if any(piece.needed for piece in pieces):
            entry = pieces[0].tensor.entry
            parts = entry.mapping.unshard(entry.parameter.detach(), model.spec)
            for piece, part in zip(pieces, parts, strict=True):
                if piece.needed:
                    yield from _sent(piece, part, model.spec)


def _sent(piece: _Sending, part: torch.Tensor, spec: ModelSpec) -> Iterator[tuple[TensorRows, torch.Tensor]]:
    """part: of this rank."""
    tensor, own = piece.tensor, piece.own
    if tensor.entry.mapping.dim == 0:
        first = tensor.of_shard(tensor.entry.group.rank(), spec).first
    else:
        part, first = joined(part, tensor.entry, spec), 0
    if own.first < own.end:
        yield tensor.rows(own), part[own.first - first : own.end - first]


def declare_share(model: BuiltModel, layout: Layout) -> list[TensorRows]:
    """All that `export_share` yields on this rank, in its order, without the numbers; not collective."""
    pieces = [piece for of_parameter in _pieces(model, layout) for piece in of_parameter]
    return [piece.tensor.rows(piece.own) for piece in pieces if piece.own.first < piece.own.end]
