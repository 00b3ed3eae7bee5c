"""Host regions alone: sizes, seals, rights, views and their lifetimes."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import errors
from engine.transport import NO_DEVICE
from engine.transport.memory import PAGE_BYTES, HostImporter, HostRegion, available_bytes
from engine.transport.tensors import host_tensor
from tests.transport.peer import held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


def test_nobody_can_resize_it_or_seal_more() -> None:
    region = HostRegion.create(PAGE_BYTES)
    descriptor = region.export()
    assert not os.get_inheritable(descriptor)
    for size in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)
    region.close()


def test_its_pages_are_there_from_the_start() -> None:
    region = HostRegion.create(64 * PAGE_BYTES)
    assert os.fstat(region._descriptor).st_blocks * 512 == region.nbytes
    region.close()


def test_sizes_that_cannot_be_are_refused_and_leave_nothing() -> None:
    before = held()
    for nbytes in (0, -PAGE_BYTES, PAGE_BYTES + 1):
        with pytest.raises(errors.DescriptorSize):
            HostRegion.create(nbytes)
    for nbytes in (2**62, 2 * available_bytes() // PAGE_BYTES * PAGE_BYTES):
        with pytest.raises(errors.DescriptorSyscall, match="are available"):
            HostRegion.create(nbytes)
    assert held() == before


def test_a_view_keeps_it_open_and_then_it_is_gone() -> None:
    before = held()
    region = HostRegion.create(2 * PAGE_BYTES)
    tensor = host_tensor(region, torch.bfloat16, (4, 8), offset=PAGE_BYTES)
    tensor.fill_(2.5)
    part = tensor[1:].T
    del tensor
    with pytest.raises(errors.RegionInUse):
        region.close()
    due = torch.full((32,), 2.5, dtype=torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(region.array(np.int16, (32,), PAGE_BYTES), due)
    assert part.shape == (8, 3)
    del part
    region.close()
    region.close()
    assert held() == before
    with pytest.raises(errors.DescriptorClosed):
        region.array(np.uint8, (1,))
    with pytest.raises(errors.DescriptorClosed):
        region.export()


def test_views_stay_inside() -> None:
    region = HostRegion.create(PAGE_BYTES)
    for shape, offset in (((PAGE_BYTES + 1,), 0), ((1,), PAGE_BYTES), ((1,), -1), ((-1,), 0)):
        with pytest.raises(errors.ShapeMismatch):
            region.array(np.uint8, shape, offset)
        with pytest.raises(errors.ShapeMismatch):
            host_tensor(region, torch.uint8, shape, offset)
    with pytest.raises(errors.ShapeMismatch):
        host_tensor(region, torch.float32, (1,), 2)
    assert region.array(np.uint8, (0,)).size == 0
    region.close()


def test_a_reader_cannot_write() -> None:
    region = HostRegion.create(PAGE_BYTES)
    region.array(np.uint8, (3,))[:] = 7
    descriptor = region.export()
    reader = HostImporter(writable=False).adopt(descriptor, PAGE_BYTES, NO_DEVICE)
    os.close(descriptor)
    assert reader.array(np.uint8, (3,)).tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="read-only"):
        reader.array(np.uint8, (3,))[0] = 1
    with pytest.raises(errors.ShapeMismatch):
        host_tensor(reader, torch.uint8, (3,))
    reader.close()
    region.close()


def test_a_descriptor_without_the_right_to_write_is_refused() -> None:
    region = HostRegion.create(PAGE_BYTES)
    descriptor = os.open(f"/proc/self/fd/{region._descriptor}", os.O_RDONLY)
    with pytest.raises(errors.DescriptorSyscall, match="mapping"):
        HostImporter().adopt(descriptor, PAGE_BYTES, NO_DEVICE)
    os.close(descriptor)
    region.close()


def test_mapped_shared_and_with_the_rights_that_were_taken() -> None:
    region = HostRegion.create(PAGE_BYTES)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert [line[1] for line in maps if "memfd:engine-region" in " ".join(line)] == ["rw-s"]
    region.close()
