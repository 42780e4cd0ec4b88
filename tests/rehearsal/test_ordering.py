"""The rules of streams and the allocator themselves: what they refuse and count is what CUDA and torch do."""

from __future__ import annotations

import pytest

from tests.rehearsal import ordering
from tests.rehearsal.allocator import MIB, Allocation, Allocator, Gpu
from tests.rehearsal.streams import Stream
from tests.support import ranks


def test_uses_that_wait_for_nothing_are_refused() -> None:
    (found,) = ranks.run(ordering.refusals, pretend_cuda=True)
    assert found.keys() == ordering.REFUSED.keys()
    for part in ("add reads of (1048576,) torch.float32", "stream", "ordering.py:", "does not wait for ones writes of"):
        assert part in found["read early"]


def test_what_is_waited_for_is_allowed() -> None:
    assert ranks.run(ordering.allow, pretend_cuda=True) == [list(ordering.ALLOWED)]


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),  # of one segment
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB + 1], 12 * MIB),
    ],
)
def test_segments_are_as_large_as_torchs(sizes: list[int], reserved: int) -> None:
    memory, stream = Allocator(Gpu()), Stream()
    kept = [Allocation(memory, size, stream) for size in sizes]
    assert memory.reserved == memory.gpu.held == reserved
    assert memory.settled() >= sum(sizes)
    kept.clear()
    assert memory.settled() == 0 and memory.reserved == reserved
    memory.empty_cache()
    assert memory.reserved == memory.gpu.held == memory.gpu.gaps == 0 and memory.gpu.peak_with_gaps == reserved


def test_freed_blocks_are_joined_and_taken_again_on_their_stream_alone() -> None:
    memory, first, second = Allocator(Gpu()), Stream(), Stream()
    kept = [Allocation(memory, 6 * MIB, first) for _ in range(3)]
    kept.clear()
    kept.append(Allocation(memory, 18 * MIB, first))
    assert memory.reserved == 20 * MIB
    kept.clear()
    kept.append(Allocation(memory, 6 * MIB, second))
    assert memory.reserved == 40 * MIB
    memory.empty_cache()
    assert memory.reserved == 20 * MIB


def test_a_segment_that_is_used_in_part_stays() -> None:
    memory, stream = Allocator(Gpu()), Stream()
    kept = [Allocation(memory, 5 * MIB, stream) for _ in range(2)]
    del kept[0]
    memory.empty_cache()
    assert memory.reserved == 20 * MIB and memory.settled() == 5 * MIB
    assert memory.gpu.held - memory.gpu.gaps == 5 * MIB


def test_a_small_model_has_a_small_allocator() -> None:
    memory, stream = Allocator(Gpu(scale=1024)), Stream()
    kept = [Allocation(memory, 1 << 10, stream) for _ in range(3)]
    assert memory.reserved == 2 * (2 << 10) and len(kept) == 3
