"""The model of torch's allocator against figures worked out by hand from its rules."""

import random

import pytest

from brimful.memory.allocator import CachingAllocator, rounded
from brimful.units import KiB, MiB


def reserved(*sizes: int, **options) -> int:
    """Reserved MiB after these allocations, none of them freed."""
    allocator = CachingAllocator(**options)
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
    return allocator.reserved_bytes // MiB


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (0, 512), (1_000_000, 1_000_448)])
def test_sizes_are_rounded_up_to_512_bytes(size, block):
    assert rounded(size) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (4, 2),
        (1 * MiB, 2),
        (1 * MiB + 1, 20),
        (10 * MiB - 512, 20),
        (10 * MiB, 10),
        (10 * MiB + 1, 12),
        (33 * MiB, 34),
    ],
)
def test_the_segment_of_a_first_block(size, segment):
    assert reserved(size) == segment


def test_small_blocks_share_a_segment():
    assert reserved(*[512 * KiB] * 4) == 2 and reserved(*[512 * KiB] * 5) == 4


def test_two_blocks_below_10_mib_share_a_segment_of_20():
    assert reserved(9 * MiB, 9 * MiB) == 20 and reserved(9 * MiB, 9 * MiB, 3 * MiB) == 40


def test_small_and_large_blocks_do_not_share():
    assert reserved(9 * MiB, 512 * KiB) == 22


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    for key, size in (("large", 40), ("small", 24), ("kept", 30)):
        allocator.allocate(key, size * MiB)
    allocator.free("large")
    allocator.free("small")
    allocator.allocate("new", 24 * MiB)  # in place of `small`, so that `large` is free for the next
    allocator.allocate("next", 40 * MiB)
    assert allocator.reserved_bytes == (40 + 24 + 30) * MiB


def test_a_rest_of_more_than_1_mib_is_split_off():
    allocator = CachingAllocator()
    allocator.allocate("first", 40 * MiB)
    allocator.free("first")
    allocator.allocate("half", 20 * MiB)
    allocator.allocate("other half", 20 * MiB)
    assert allocator.reserved_bytes == 40 * MiB and allocator.allocated_bytes == 40 * MiB


def test_a_rest_of_1_mib_stays_with_its_block():
    allocator = CachingAllocator()
    allocator.allocate("first", 40 * MiB)
    allocator.free("first")
    allocator.allocate("second", 39 * MiB)
    assert allocator.allocated_bytes == 40 * MiB


def test_freed_neighbours_become_one_block():
    allocator = CachingAllocator()
    for key in "abcd":
        allocator.allocate(key, 5 * MiB)  # four in one segment of 20 MiB
    for key in "bdc":
        allocator.free(key)
    allocator.allocate("whole", 15 * MiB)
    assert allocator.reserved_bytes == 20 * MiB


def test_blocks_of_different_segments_are_not_joined():
    allocator = CachingAllocator()
    for key in "ab":
        allocator.allocate(key, 20 * MiB)
    for key in "ab":
        allocator.free(key)
    allocator.allocate("whole", 40 * MiB)
    assert allocator.reserved_bytes == 80 * MiB


def test_at_the_limit_free_segments_go_back_to_the_driver():
    allocator = CachingAllocator(limit_bytes=60 * MiB)
    for key in "ab":
        allocator.allocate(key, 20 * MiB)
    for key in "ab":
        allocator.free(key)
    allocator.allocate("whole", 40 * MiB)
    assert (allocator.retries, allocator.out_of_memory) == (1, False)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (40 * MiB, 40 * MiB)


def test_a_segment_with_a_live_block_does_not_go_back():
    allocator = CachingAllocator(limit_bytes=60 * MiB)
    allocator.allocate("a", 9 * MiB)
    allocator.allocate("b", 9 * MiB)  # beside `a`, in a segment of 20 MiB
    allocator.free("a")
    allocator.allocate("large", 42 * MiB)
    assert (allocator.retries, allocator.out_of_memory) == (1, True)


def test_an_allocation_above_the_limit_is_out_of_memory_and_still_counted():
    allocator = CachingAllocator(limit_bytes=60 * MiB)
    allocator.allocate("a", 62 * MiB)
    assert allocator.out_of_memory and allocator.peak_reserved_bytes == 62 * MiB


def test_exactly_the_limit_fits():
    allocator = CachingAllocator(limit_bytes=60 * MiB)
    allocator.allocate("a", 60 * MiB)
    assert not allocator.out_of_memory and allocator.retries == 0


def test_expandable_segments_grow_by_pages_of_20_mib():
    assert [reserved(size * MiB, expandable=True) for size in (2, 20, 21, 59)] == [20, 20, 40, 60]


def test_expandable_small_segments_grow_by_2_mib():
    assert reserved(*[512 * KiB] * 5, expandable=True) == 4


def test_an_expandable_segment_grows_where_its_end_is_free():
    """Two freed blocks of 20 MiB hold 40 MiB, where two native segments do not; for 50 MiB one page more is enough."""
    allocator = CachingAllocator(expandable=True)
    for key in "ab":
        allocator.allocate(key, 20 * MiB)
    for key in "ab":
        allocator.free(key)
    allocator.allocate("whole", 40 * MiB)
    assert allocator.reserved_bytes == 40 * MiB
    allocator.free("whole")
    allocator.allocate("more", 50 * MiB)
    assert allocator.reserved_bytes == 60 * MiB


def test_the_end_of_an_expandable_segment_is_taken_last():
    """It can still grow. So `new` goes into the larger gap in front, and `long` gets all of the end."""
    allocator = CachingAllocator(expandable=True)
    for key, size in (("gap", 40), ("kept", 20), ("end", 20)):
        allocator.allocate(key, size * MiB)
    allocator.free("gap")
    allocator.free("end")
    allocator.allocate("new", 20 * MiB)
    allocator.allocate("long", 60 * MiB)
    assert allocator.reserved_bytes == (40 + 20 + 60) * MiB


def test_at_the_limit_the_free_end_of_an_expandable_segment_goes_back():
    allocator = CachingAllocator(limit_bytes=60 * MiB, expandable=True)
    allocator.allocate("a", 40 * MiB)
    allocator.free("a")
    allocator.allocate("small", 512)
    for key in range(11):  # 22 MiB of the small pool
        allocator.allocate(key, 1 * MiB)
        allocator.allocate(-1 - key, 1 * MiB)
    assert allocator.retries >= 1 and not allocator.out_of_memory


def test_peaks_stay_when_everything_is_freed():
    allocator = CachingAllocator()
    allocator.allocate("a", 30 * MiB)
    allocator.free("a")
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 30 * MiB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (30 * MiB, 30 * MiB)


@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_reserved_holds_what_is_allocated_and_all_of_it_is_free_in_the_end(expandable):
    """A thousand random allocations and frees."""
    numbers, allocator, live = random.Random(0), CachingAllocator(expandable=expandable), dict[int, int]()
    for key in range(1000):
        if live and numbers.random() < 0.45:
            one = numbers.choice(list(live))
            allocator.free(one)
            del live[one]
        else:
            live[key] = numbers.choice([numbers.randint(1, 4096), numbers.randint(1, 30 * MiB)])
            allocator.allocate(key, live[key])
        assert sum(live.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
    for one in live:
        allocator.free(one)
    assert allocator.allocated_bytes == 0
