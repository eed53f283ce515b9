"""Freed memory really goes back to the system."""

import ctypes
import sys
from pathlib import Path

import pytest

from brimful.memory.meter import trim_heap
from brimful.units import MiB

GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim")


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not GLIBC, reason="the C library cannot be asked")
def test_what_was_freed_below_something_that_lives_is_given_back():
    del [bytearray(4 * MiB)][:]  # from now on blocks of 1 MiB lie in the heap
    blocks = [bytearray(b"x" * MiB) for _ in range(128)]
    pins = blocks[::8]
    del blocks
    before = anonymous_bytes()
    trim_heap()
    assert before - anonymous_bytes() > 64 * MiB
    assert len(pins) == 16
