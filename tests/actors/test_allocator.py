"""Freed memory stays with the process, so that the next large tensors cost no page faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


THREADS = """
import ctypes, sys, threading
from engine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
library.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
library.fclose.argtypes = [ctypes.c_void_p]
meet = threading.Barrier(4)
def hold():
    held = bytearray(1 << 14)
    meet.wait()
    return held
threads = [threading.Thread(target=hold) for _ in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
told = library.fopen(sys.argv[2].encode(), b"w")
library.malloc_info(0, told)
library.fclose(told)
"""


def heaps(how: str, told: Path) -> int:
    """Heaps of a process that had four threads."""
    done = subprocess.run([sys.executable, "-c", THREADS, how, str(told)], capture_output=True, text=True)
    if "malloc_info" in done.stderr:
        pytest.skip("the C library doesn't tell of its heaps")
    return told.read_text().count("<heap nr=")


def test_all_threads_share_one_heap(tmp_path: Path) -> None:
    assert heaps("as it is", tmp_path / "heaps") > 1
    assert heaps("kept", tmp_path / "heaps") == 1


TUPLES = """
import gc, sys
from engine.allocator import fill_tuples
gc.collect()
if sys.argv[1] == "kept":
    fill_tuples()
before = sys.getallocatedblocks()
for _ in range(2000):
    for length in range(1, 21):
        tuple(number for number in range(length))
print(sys.getallocatedblocks() - before)
"""


def test_python_keeps_as_many_tuples_as_ever_from_the_start() -> None:
    def blocks(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", TUPLES, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    if (grows := blocks("as it is")) < 10_000:
        pytest.skip(f"this Python keeps {grows} blocks more, however many tuples have gone")
    assert blocks("kept") < 100
