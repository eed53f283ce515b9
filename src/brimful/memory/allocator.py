"""A model of torch's caching allocator: what a sequence of allocations makes it reserve from the driver.

A limit bounds reserved bytes, and those are not a multiple of the allocated ones: they depend on which freed blocks the next
tensor fits into. So the allocator's rules are applied to the sequence itself. They are those of the native CUDA allocator with
one stream:

    sizes        rounded up to 512 bytes
    pools        one for blocks of at most 1 MiB, which lie in segments of 2 MiB, and one for larger blocks
    segments     20 MiB for blocks below 10 MiB; for larger ones their own size, rounded up to 2 MiB
    best fit     the smallest free block that is large enough; the rest is split off if it is large enough to be of use
    freeing      joins a block with the free ones beside it
    full         segments without a live block go back to the driver, and the allocation is tried again

With `expandable` segments (`expandable_segments:True`) each pool is one segment that grows by pages of 2 or 20 MiB, every rest is
split off, and the block at the end is taken only if no other is large enough, because it can still grow.

Against an H200, replaying the steps of a T5 gave reserved bytes within 4 % (`tests/estimation/test_measured.py`).
"""

from bisect import bisect_left, insort
from collections.abc import Hashable

from brimful.units import MiB

ROUNDING = 512
SMALL = 1 * MiB
"""Blocks up to this size are in the small pool, and a rest of a large block is split off only if it is larger than this."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB
LARGE = 10 * MiB
"""Blocks of this size and above have segments of their own."""
SEGMENT_ROUNDING = 2 * MiB


def rounded(size: int) -> int:
    """The bytes of the block that an allocation of this size gets."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


class _Block:
    """A piece of a segment, live or free, between its neighbours."""

    __slots__ = ("address", "before", "behind", "live", "size")

    def __init__(self, address: int, size: int, before: "_Block | None" = None, behind: "_Block | None" = None) -> None:
        self.address, self.size, self.before, self.behind = address, size, before, behind
        self.live = False


class _Pool:
    """The free blocks of one pool, by size."""

    def __init__(self, *, page: int, least_rest: int) -> None:
        self.page, self.least_rest = page, least_rest
        self.sizes: list[tuple[int, int]] = []
        self.blocks: dict[int, _Block] = {}
        self.last: _Block | None = None
        """The block at the end of an expandable segment."""

    def add(self, block: _Block) -> None:
        insort(self.sizes, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.sizes[bisect_left(self.sizes, (block.size, block.address))]
        del self.blocks[block.address]

    def take(self, size: int) -> _Block | None:
        """The smallest free block of at least this size, no longer free. One that can grow counts as the largest."""
        place = bisect_left(self.sizes, (size, -1))
        if place == len(self.sizes):
            return None
        if self.blocks[self.sizes[place][1]] is self.last and place + 1 < len(self.sizes):
            place += 1
        _, address = self.sizes.pop(place)
        return self.blocks.pop(address)


class CachingAllocator:
    """Takes allocations and frees by key, and counts what they reserve.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate("weights", 30 * MiB)
    >>> allocator.allocate("loss", 4)
    >>> allocator.free("weights")
    >>> allocator.allocate("logits", 20 * MiB)  # takes the place of the weights
    >>> allocator.reserved_bytes // MiB, allocator.peak_allocated_bytes // MiB
    (32, 30)
    """

    def __init__(self, *, limit_bytes: int | None = None, expandable: bool = False) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0
        """Of blocks, as torch counts them: a block may be a little larger than what was asked for."""
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        """How often free segments went back to the driver because the limit was reached."""
        self.out_of_memory = False
        """Whether an allocation did not fit even then. It is made all the same."""
        self._limit_bytes, self._expandable = limit_bytes, expandable
        self._small = _Pool(page=SMALL_SEGMENT, least_rest=ROUNDING)
        self._large = _Pool(page=LARGE_SEGMENT, least_rest=ROUNDING if expandable else SMALL + ROUNDING)
        self._live: dict[Hashable, _Block] = {}
        self._next_address = 0

    def allocate(self, key: Hashable, size: int) -> None:
        size = rounded(size)
        pool = self._small if size <= SMALL else self._large
        block = pool.take(size)
        if block is None:
            block = self._grow(pool, size) if self._expandable else self._new_segment(pool, size)
        if block.size - size >= pool.least_rest:
            rest = _Block(block.address + size, block.size - size, block, block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.size = rest, size
            if pool.last is block:
                pool.last = rest
            pool.add(rest)
        block.live = True
        self._live[key] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes

    def free(self, key: Hashable) -> None:
        block = self._live.pop(key)
        block.live = False
        self.allocated_bytes -= block.size
        pool = self._small if block.size <= SMALL else self._large
        behind, before = block.behind, block.before
        if behind is not None and not behind.live:
            pool.remove(behind)
            self._join(pool, block, behind)
        if before is not None and not before.live:
            pool.remove(before)
            self._join(pool, before, block)
            block = before
        pool.add(block)

    def forget_peak(self) -> None:
        """Reset the peak of allocated bytes."""
        self.peak_allocated_bytes = self.allocated_bytes

    def _join(self, pool: _Pool, block: _Block, behind: _Block) -> None:
        block.size += behind.size
        block.behind = behind.behind
        if block.behind is not None:
            block.behind.before = block
        if pool.last is behind:
            pool.last = block

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        needed = pool.page if size < LARGE else -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        self._reserve(needed)
        address, self._next_address = self._next_address, self._next_address + needed
        return _Block(address, needed)

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Add pages behind the last block of the pool, and take that block with it if it is free."""
        last = pool.last
        if last is not None and not last.live:
            pool.remove(last)
            block = last
        else:
            start = (0 if pool is self._small else 1 << 50) if last is None else last.address + last.size
            block = _Block(start, 0, last)
            if last is not None:
                last.behind = block
        pages = -(-(size - block.size) // pool.page) * pool.page
        self._reserve(pages)
        block.size += pages
        pool.last = block
        return block

    def _reserve(self, size: int) -> None:
        if self._limit_bytes is not None and self.reserved_bytes + size > self._limit_bytes:
            self._return_free_segments()
            self.out_of_memory |= self.reserved_bytes + size > self._limit_bytes
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _return_free_segments(self) -> None:
        """Of an expandable segment, only pages at its end go back. (torch also unmaps those in between.)"""
        self.retries += 1
        for pool in (self._small, self._large):
            for block in list(pool.blocks.values()):
                if block is pool.last:
                    self._shorten(pool, block)
                elif not self._expandable and block.before is None and block.behind is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _shorten(self, pool: _Pool, block: _Block) -> None:
        pages = block.size // pool.page * pool.page
        pool.remove(block)
        block.size -= pages
        self.reserved_bytes -= pages
        if block.size:
            pool.add(block)
            return
        pool.last = block.before
        if block.before is not None:
            block.before.behind = None
