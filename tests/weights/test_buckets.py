"""What is fetched at once: rows of several ranks become whole tensors, and receivers begin at different places."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctpo_megatron.base.tensor_rows import TensorRows
from ctpo_megatron.engines.weights.buckets import ALIGNED, Bucket, Entry, Share, Tensor, dtype_of, plan, rotated
from ctpo_megatron.engines.weights.tcp_transport import WeightMemory

DTYPES = (torch.float32, torch.bfloat16)


def shared_out(tensors: list[torch.Tensor], cuts: list[list[int]], ranks: int) -> list[WeightMemory]:
    """Each tensor is cut before these rows, and rank by rank gets a part."""
    parts: list[list[tuple[TensorRows, torch.Tensor]]] = [[] for _ in range(ranks)]
    for number, (tensor, places) in enumerate(zip(tensors, cuts, strict=True)):
        whole = TensorRows.whole(f"layers.{number // 2}.{number}", tuple(tensor.shape), tensor.dtype)
        bounds = sorted({0, whole.rows, *(place for place in places if place < whole.rows)})
        for at, (first, end) in enumerate(itertools.pairwise(bounds)):
            rows = whole._replace(first=first, rows=end - first)
            parts[(number + at) % ranks].append((rows, tensor[first:end]))
    memories = [WeightMemory() for _ in range(ranks)]
    for memory, of_rank in zip(memories, parts, strict=True):
        memory.plan([rows for rows, _ in of_rank], 1)
        memory.fill(of_rank)
    return memories


def fetched(bucket: Bucket, memories: list[WeightMemory]) -> dict[str, torch.Tensor]:
    """Its tensors, after each piece was copied from where it is held."""
    content = bytearray(bucket.size)
    for share, first, size, place in bucket.pieces:
        content[place : place + size] = memories[share].content(first, size)
    data = torch.frombuffer(content, dtype=torch.uint8)
    return {
        name: data[place : place + size].view(dtype_of(dtype)).view(shape)
        for name, dtype, shape, place, size in bucket.tensors
    }


SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.sampled_from(DTYPES)), min_size=1, max_size=8)


@given(st.data(), SHAPES, st.integers(1, 3), st.integers(1, 2000))
def test_rows_of_several_ranks_become_whole_tensors(
    data: st.DataObject, shapes: list[tuple[int, int, torch.dtype]], ranks: int, bucket_bytes: int
) -> None:
    tensors = [torch.randn(rows, columns).to(dtype) for rows, columns, dtype in shapes]
    cuts = [data.draw(st.lists(st.integers(1, 8), max_size=2)) for _ in tensors]
    memories = shared_out(tensors, cuts, ranks)
    shares = [Share("", number, memory.entries) for number, memory in enumerate(memories)]
    buckets = plan(shares, bucket_bytes)
    assert all(bucket.size <= bucket_bytes or len(bucket.tensors) == 1 for bucket in buckets)
    assert all(tensor.place % ALIGNED == 0 for bucket in buckets for tensor in bucket.tensors)
    found = {name: tensor for bucket in buckets for name, tensor in fetched(bucket, memories).items()}
    assert len(found) == len(tensors)
    for number, tensor in enumerate(tensors):
        assert torch.equal(found[f"layers.{number // 2}.{number}"], tensor)


def entry(name: str, start: int, first: int, size: int) -> Entry:
    return Entry(name, "float32", (4, 4), start, first, size)


@pytest.mark.parametrize(
    ("of_ranks", "held"),
    [
        ([[entry("a", 0, 0, 32)]], "0 to 32"),
        ([[entry("a", 32, 0, 32)]], "32 to 64"),
        ([[entry("a", 0, 0, 64)], [entry("a", 32, 0, 32)]], "0 to 64, 32 to 64"),
        ([[entry("a", 0, 0, 16)], [entry("a", 32, 0, 32)]], "0 to 16, 32 to 64"),
    ],
)
def test_a_tensor_of_which_rows_are_missing_or_held_twice_is_refused(of_ranks: list[list[Entry]], held: str) -> None:
    shares = [Share("", number, entries) for number, entries in enumerate(of_ranks)]
    with pytest.raises(ValueError, match=f"of the 64 bytes of a the ranks hold {held}, which"):
        plan(shares, 1 << 20)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 8))
def test_receivers_begin_equally_far_apart(sizes: list[int], of: int) -> None:
    buckets = [Bucket([Tensor("a", "uint8", (size,), 0, size)], [], size) for size in sizes]
    before = [0, *itertools.accumulate(sizes)]
    for number in range(of):
        start = min(at for at, size in enumerate(before) if size * of >= sum(sizes) * number)
        assert rotated(buckets, number, of) == [*range(start, len(sizes)), *range(start)]
