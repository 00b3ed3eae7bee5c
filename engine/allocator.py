"""What a rank's process keeps of freed memory, and has from the start what it would keep later.

The C library's heap keeps what is freed: asking the system again costs more than most operations take.

By default glibc maps large blocks anew each time and gives the top of its heap back, and each page that comes
back is a fault. On a virtual machine with two processors, a dozen operations on tensors of some MiB took 144
ms of processor time with its defaults and 95 ms so. A rank's memory then stands at its highest mark and stays
there, which also makes growth visible.

All threads share one heap. Other threads' heaps are rows of areas of 64 MiB: one that a step no longer needs
is given back whatever the settings say, and the holes in one are of no use to the next.

numpy keeps freed blocks, too: up to seven of each size below 1024 bytes, 3.5 MiB in all. Filled by requests,
that took a rank more than an hour and looked like a leak: whatever still lived of what 300 requests had
allocated, 800 blocks, was of this cache. Each of them also cut the heap where it happened to lie, so that
later a block of some MiB found no place in it.

Python keeps freed tuples: up to 2000 of each length to 20, 5 MiB in all. A tuple that is made of a generator
is cut to its length, and none is taken from what is kept: each such one adds to it, 30 bytes a request.
"""

from __future__ import annotations

import ctypes

import numpy as np

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_BLOCK = 32 << 20
"""Larger ones are mapped apart; glibc takes no higher bound."""

KEPT = 512 << 20
"""Free memory at the top of a heap that isn't given back."""


CACHED_BELOW, CACHED_EACH = 1024, 7
"""Of numpy's cache of data blocks: sizes in bytes, and blocks of each that it keeps."""

LONGEST_KEPT, TUPLES_KEPT = 20, 2000
"""Of Python's freed tuples: the length, and how many of each."""


def keep_freed_memory() -> bool:
    """For the whole process; call it before there are threads, as each keeps the heap that it has.

    False where the C library has no such settings (musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST_BLOCK), (M_TRIM_THRESHOLD, KEPT))
    _fill_block_cache()
    return mallopt is not None and all(mallopt(name, value) for name, value in settings)


def _fill_block_cache() -> None:
    """numpy's, which has all that it will ever keep behind this."""
    # All are alive at once, and go to the cache together.
    blocks = [np.empty(size, np.uint8) for size in range(1, CACHED_BELOW) for _ in range(CACHED_EACH)]
    blocks.clear()


def fill_tuples() -> None:
    """Python keeps as many freed tuples as it ever will; call it behind the last full collection."""
    samples = [[None] * length for length in range(1, LONGEST_KEPT + 1)]
    tuples = [tuple(sample) for sample in samples for _ in range(TUPLES_KEPT)]
    tuples.clear()
