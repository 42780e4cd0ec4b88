"""GPU memory as torch's caching allocator reserves it (torch 2.13, c10/cuda/CUDACachingAllocator.cpp).

Blocks are rounded to 512 bytes and cut from segments: of 2 MiB for blocks up to 1 MiB, of 20 MiB up to 10 MiB, and
larger ones of their own size, in steps of 2 MiB. A block belongs to the stream that it was allocated on, and is
taken again on that stream alone. A segment is given back in `empty_cache` alone, when all of it is free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque

from tests.rehearsal.streams import Stream, Use, Uses, is_over

MIB = 1 << 20
_SMALLEST, _SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE, _STEP = 512, MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
_Pool = tuple[int, bool]
"""Number of a stream, and whether for small blocks."""


class Gpu:
    """Bytes that all processes on one GPU have of the driver.

    gaps: free parts of segments that are in use in part, which no process can give back. peak: most bytes since
    `watch`, without gaps; peak_with_gaps: with them. scale: a small model stands for one so much larger, so that the
    allocator's constants are so much smaller.
    """

    def __init__(self, scale: int = 1) -> None:
        self.scale, self.held, self.gaps, self.peak, self.peak_with_gaps = scale, 0, 0, 0, 0

    def take(self, size: int) -> None:
        """Of the driver; given back where negative."""
        self.held += size
        self.look()

    def look(self) -> None:
        """Note whether this is the peak."""
        self.peak = max(self.peak, self.held - self.gaps)
        self.peak_with_gaps = max(self.peak_with_gaps, self.held)

    def watch(self) -> None:
        """The peaks are those of now."""
        self.peak, self.peak_with_gaps = self.held - self.gaps, self.held


class Block:
    """A part of a segment. before, behind: its neighbours there. uses: of the tensors that had it."""

    def __init__(self, pool: _Pool, size: int) -> None:
        self.pool, self.size, self.free = pool, size, False
        self.before: Block | None = None
        self.behind: Block | None = None
        self.uses: dict[int, Use] = {}
        self.recorded = False

    @property
    def gap(self) -> int:
        """Its size where it is not all of its segment."""
        return self.size if self.before or self.behind else 0


class Allocator:
    """Of one process. reserved: bytes of its segments; allocated: bytes of blocks in use."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.reserved, self.allocated = gpu, 0, 0
        self._free: dict[_Pool, list[tuple[int, int, Block]]] = defaultdict(list)
        self._dropped: deque[tuple[Block, dict[int, Use]]] = deque()
        self._deferred: list[Block] = []

    def allocate(self, size: int, stream: Stream) -> Block:
        """A block of at least `size` > 0 bytes."""
        self._settle()
        size = self._up(size, _SMALLEST)
        small = size <= self._scaled(_SMALL)
        block = self._taken((stream.number, small), size) or self._segment((stream.number, small), size)
        rest = block.size - size
        if rest >= self._scaled(_SMALLEST) if small else rest > self._scaled(_SMALL):
            self._split(block, size)
        self.allocated += block.size
        self.gpu.look()
        return block

    def drop(self, block: Block, uses: Uses) -> None:
        """Nothing has it any more. May be called at any time, as Python deletes objects."""
        self._dropped.append((block, uses.all()))

    def empty_cache(self) -> None:
        """Give back segments that are free. Blocks that other streams were recorded for are waited for."""
        self._settle(wait=True)
        for blocks in self._free.values():
            for entry in [entry for entry in blocks if entry[2].before is entry[2].behind is None]:
                blocks.remove(entry)
                self._reserve(-entry[0])
        self.gpu.look()

    def settled(self) -> int:
        """Bytes of blocks in use now."""
        self._settle()
        return self.allocated

    def _scaled(self, size: int) -> int:
        return max(1, size // self.gpu.scale)

    def _up(self, size: int, step: int) -> int:
        step = self._scaled(step)
        return -(-size // step) * step

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.gpu.held += size

    def _taken(self, pool: _Pool, size: int) -> Block | None:
        """The smallest free block that is large enough."""
        blocks = self._free[pool]
        place = bisect_left(blocks, (size, 0))
        if place == len(blocks):
            return None
        block = blocks[place][2]
        self._unlist(block)
        return block

    def _segment(self, pool: _Pool, size: int) -> Block:
        if pool[1]:
            whole = self._scaled(_SMALL_SEGMENT)
        else:
            whole = self._scaled(_LARGE_SEGMENT) if size < self._scaled(_LARGE) else self._up(size, _STEP)
        self._reserve(whole)
        return Block(pool, whole)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.pool, block.size - size)
        rest.before, rest.behind, rest.uses = block, block.behind, dict(block.uses)
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        self._list(rest)

    def _list(self, block: Block) -> None:
        block.free = True
        self.gpu.gaps += block.gap
        insort(self._free[block.pool], (block.size, id(block), block))

    def _unlist(self, block: Block) -> None:
        blocks = self._free[block.pool]
        del blocks[bisect_left(blocks, (block.size, id(block)))]
        block.free = False
        self.gpu.gaps -= block.gap

    def _settle(self, *, wait: bool = False) -> None:
        """Take back what was dropped, but for blocks recorded for other streams that are not known to be over."""
        while self._dropped:
            block, uses = self._dropped.popleft()
            self.allocated -= block.size
            block.uses = uses
            if block.recorded:
                self._deferred.append(block)
            else:
                self._merge(block)
        waiting, self._deferred = self._deferred, []
        for block in waiting:
            if wait or is_over(block.uses):
                block.recorded, block.uses = False, {}
                self._merge(block)
            else:
                self._deferred.append(block)

    def _merge(self, block: Block) -> None:
        for other in (block.before, block.behind):
            if other is None or not other.free:
                continue
            self._unlist(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.behind = second.behind
            if second.behind is not None:
                second.behind.before = first
            for number, use in second.uses.items():
                if number not in first.uses or first.uses[number].number < use.number:
                    first.uses[number] = use
            block = first
        self._list(block)


class Allocation:
    """The memory of one storage, for as long as this object lives."""

    def __init__(self, memory: Allocator | None, size: int, stream: Stream) -> None:
        self._memory = memory if size else None
        self._block = memory.allocate(size, stream) if memory is not None and size else None
        self.uses = Uses(self._block.uses if self._block else None)

    def record_stream(self) -> None:
        """See `Tensor.record_stream`."""
        if self._block is not None:
            self._block.recorded = True

    def __del__(self) -> None:
        if self._block is not None and self._memory is not None:
            self._memory.drop(self._block, self.uses)
