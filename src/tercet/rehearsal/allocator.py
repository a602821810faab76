"""How a card's memory is cut into blocks: rounding, pools and kept blocks as PyTorch documents them for CUDA.

Sources: "CUDA semantics", section "Memory management" (pytorch.org/docs/stable/notes/cuda.html), and the sizes in
c10/core/AllocatorConfig.h (pytorch, 2.13). What is simulated is what moves the peak of reserved memory: rounding to
512 bytes, segments of 2 MiB and 20 MiB, best fit, splitting, merging, and giving kept segments back before an
allocation fails.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
ROUNDING = 512  # every block's size is a multiple of it
SMALL = 1 * MIB  # up to here a block comes from a small segment
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # of blocks below LARGE_ALONE
LARGE_ALONE = 10 * MIB  # from here a block has a segment of its own, rounded up to ALONE_ROUNDING
ALONE_ROUNDING = 2 * MIB


@dataclass(eq=False)
class Block:
    """A stretch of one segment. `before` and `after` are its neighbours there.

    `unfinished`: work of other streams that need not have ended when the stretch was given back.
    """

    size: int
    segment: int
    stream: int
    small: bool
    free: bool = False
    unfinished: list[Any] = field(default_factory=list, repr=False)
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    def __lt__(self, other: Block) -> bool:
        return self.size < other.size


class OutOfCapacity(Exception):
    """An allocation that does not fit; the caller words it."""


class Allocator:
    """One card's caching allocator. All figures in bytes.

    allocated: sum of the blocks in use, as rounded; reserved: sum of the segments taken from the card.
    """

    def __init__(self, capacity_bytes: int):
        self.capacity = capacity_bytes
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._free: dict[tuple[int, bool], list[Block]] = {}
        self._segments = 0

    def allocate(self, size: int, stream: int) -> Block:
        """Return a block of at least `size` bytes for work on `stream`; raises OutOfCapacity."""
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        small = size <= SMALL
        block = self._kept(size, stream, small) or self._new_segment(size, stream, small)
        if self._may_split(block, size):
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Keep a block for later; it joins its free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._list(other).remove(other)
                block = self._join(block, other)
        block.free = True
        insort(self._list(block), block)

    def empty_cache(self) -> None:
        """Give back every segment that holds nothing."""
        for blocks in self._free.values():
            for block in [b for b in blocks if b.before is None and b.after is None]:
                blocks.remove(block)
                self.reserved -= block.size

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _list(self, block: Block) -> list[Block]:
        return self._free.setdefault((block.stream, block.small), [])

    def _kept(self, size: int, stream: int, small: bool) -> Block | None:
        """Return the smallest kept block that is large enough, or None."""
        blocks = self._free.setdefault((stream, small), [])
        for n, block in enumerate(blocks):
            if block.size >= size:
                return blocks.pop(n)
        return None

    def _new_segment(self, size: int, stream: int, small: bool) -> Block:
        if small:
            segment = SMALL_SEGMENT
        elif size < LARGE_ALONE:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ALONE_ROUNDING) * ALONE_ROUNDING
        if self.reserved + segment > self.capacity:
            self.empty_cache()
        if self.reserved + segment > self.capacity:
            raise OutOfCapacity
        self._segments += 1
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(segment, self._segments, stream, small)

    def _may_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= ROUNDING if block.small else rest > SMALL

    def _split(self, block: Block, size: int) -> None:
        unfinished = list(block.unfinished)
        rest = Block(block.size - size, block.segment, block.stream, block.small, True, unfinished, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self._list(rest), rest)

    @staticmethod
    def _join(block: Block, other: Block) -> Block:
        """Return the earlier of two neighbours, grown by the later one."""
        first, second = (other, block) if block.before is other else (block, other)
        first.size += second.size
        first.unfinished += second.unfinished
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
