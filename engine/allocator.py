"""The C library's heap keeps what is freed: asking the system again costs more than most operations take.

By default glibc maps large blocks anew each time and gives the top of its heap back, and each page that comes
back is a fault. On a virtual machine with two processors, a dozen operations on tensors of some MiB took 144
ms of processor time with its defaults and 95 ms so. A rank's memory then stands at its highest mark and stays
there, which also makes growth visible.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK = 32 << 20
"""Larger ones are mapped apart; glibc takes no higher bound."""

KEPT = 512 << 20
"""Free memory at the top of a heap that isn't given back."""


def keep_freed_memory() -> bool:
    """For the whole process; False where the C library has no such settings (musl)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
