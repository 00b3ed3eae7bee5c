"""Freed memory stays with the process, so that large tensors cost no page faults."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

COUNT = """
import resource, sys
from engine.allocator import keep_freed_memory
import torch
torch.set_num_threads(1)
print(keep_freed_memory() if sys.argv[1] == "kept" else False)
def work():
    held = [torch.ones(1 << 20) for _ in range(8)]
for _ in range(4):
    work()
began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began)
"""


def faults(how: str) -> tuple[bool, int]:
    """Page faults of eight tensors of 4 MiB that live at a time."""
    told = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True)
    known, count = told.stdout.split()
    return known == "True", int(count)


def test_large_tensors_are_made_of_memory_that_is_there() -> None:
    known, kept = faults("kept")
    if not known:
        pytest.skip("the C library has no such settings")
    if resource.getrusage(resource.RUSAGE_SELF).ru_minflt == 0:
        pytest.skip("this system counts no page faults")
    assert kept < 100 < faults("given back")[1]
