"""The chunk loop of the streaming head on pretended GPUs: how often the host waits, how many rows a chunk has."""

from __future__ import annotations

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.plan import (
    Split,
    head_chunk_rows,
)
from docs.site.sizing import MODELS
from tests.rehearsal import pageable, waits
from tests.support import ranks


def test_the_host_waits_no_oftener_for_more_chunks() -> None:
    """At most once for the rows and once for the tiles; not at all where the caller knows both."""
    assert ranks.run(waits.counts, pretend_cuda=True) == [waits.EXPECTED]


def test_all_ranks_take_the_rows_that_suit_the_smallest_gpu() -> None:
    """They gather statistics chunk by chunk: another number of chunks on one rank would leave the others waiting."""
    (first, large), (second, small) = ranks.run(waits.chunk_of_unequal_gpus, ranks=2, pretend_cuda=True)
    spec, policy = MODELS["Qwen3-4B"], PolicyConfig(dtype="bfloat16", recompute="full", use_distributed_optimizer=True)
    assert first == second == head_chunk_rows(spec, Split.of(policy, 2), small)
    assert first < head_chunk_rows(spec, Split.of(policy, 2), large)


def test_copies_from_memory_that_is_not_pinned_are_refused() -> None:
    ((to, cuda, copy, *more),) = ranks.run(pageable.refusals, pretend_cuda=True)
    said = "a copy that is non_blocking needs pinned memory, or the host waits for it"
    assert [to, cuda, copy] == [f"to: {said}", f"cuda: {said}", f"copy_: {said}"] and more == []


def test_tensors_of_many_dtypes_are_one_copy() -> None:
    ((same, waits),) = ranks.run(pageable.of_many_dtypes, pretend_cuda=True)
    assert same == [True] * 5 and waits == 0
