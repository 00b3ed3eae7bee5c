"""Freed memory stays with the process, so that the next large tensors cost no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

TENSORS = """
import sys
from engine.allocator import keep_freed_memory
import torch
known = keep_freed_memory() if sys.argv[1] == "kept" else False
def resident_mib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
before = resident_mib()
held = [torch.ones(1 << 20) for _ in range(32)]
full = resident_mib()
held.clear()
print(known, full - before, full - resident_mib())
"""


def freed(how: str) -> tuple[bool, float, float]:
    """MiB that 32 tensors of 4 MiB take, and MiB that the system has again when they are gone."""
    told = subprocess.run([sys.executable, "-c", TENSORS, how], capture_output=True, text=True, check=True)
    known, taken, back = told.stdout.split()
    return known == "True", float(taken), float(back)


def test_what_is_freed_stays_with_the_process() -> None:
    known, taken, back = freed("kept")
    if not known:
        pytest.skip("the C library has no such settings")
    assert taken > 100
    assert back < 10
    assert freed("given back")[2] > 100


SMALL = """
import ctypes, sys
import numpy as np
from engine.allocator import keep_freed_memory
class Heap(ctypes.Structure):
    _fields_ = [(f"other{n}", ctypes.c_size_t) for n in range(7)] + [("used", ctypes.c_size_t)]
    _fields_ += [(f"more{n}", ctypes.c_size_t) for n in range(2)]
info = ctypes.CDLL(None).mallinfo2
info.restype = Heap
if sys.argv[1] == "kept":
    keep_freed_memory()
before = info().used
for size in range(1, 1024):
    held = [np.zeros(size, np.uint8) for _ in range(7)]
held.clear()
print(info().used - before)
"""


def grown(how: str) -> int:
    """Bytes of the heap that are in use behind arrays of all small sizes that are gone."""
    told = subprocess.run([sys.executable, "-c", SMALL, how], capture_output=True, text=True)
    if "mallinfo2" in told.stderr:
        pytest.skip("the C library doesn't tell what is in use")
    return int(told.stdout)


def test_the_cache_of_small_blocks_is_full_from_the_start() -> None:
    assert grown("as it is") > 3 << 20
    assert grown("kept") < 100 << 10
