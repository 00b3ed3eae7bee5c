"""Device memory between processes over a stand-in for the driver: the calls, their order, and every failure.

The real driver is measured and checked by `python -m engine bench descriptors --device cuda`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import errors
from engine.transport import Kind, Layout
from engine.transport.cuda import Driver
from engine.transport.descriptors import accept, offer
from engine.transport.device import DeviceImporter, DeviceRegion
from engine.transport.tensors import device_tensor, dlpack_bytes
from tests.transport.peer import fill, held, holds
from tests.transport.peers import Peers
from tests.transport.standin import UNIT, build, bytes_of
from tests.transport.test_descriptors import end_of, named

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is Linux's")
LAYOUT = Layout(
    Kind.CUDA_VMM, ((0, 2 * UNIT), (3 * UNIT, UNIT), (4 * UNIT, UNIT)), 8 * UNIT, UNIT, 3, b"\xa1" * 16
)
FAULTS = {
    "device": "Device",
    "kind": "Kind",
    "same descriptor": "Duplicate",
    "same memory": "Size",
    "two": "Count",
    "pipe": "Kind",
    "disk": "Kind",
    "unsealed": "Kind",
    "close": "Closed",
    "kill": "PeerDead",
    "child": "PeerReplaced",
}
MAPPING = {
    "cuDeviceGetUuid_v2": 9,
    "cuDeviceCanAccessPeer": 3,
    "cuDevicePrimaryCtxRetain": 6,
    "cuMemGetAllocationGranularity": 3,
    "cuMemAddressReserve": 6,
    "cuMemMap": 6,
    "cuMemSetAccess": 3,
    "cuMemImportFromShareableHandle": 3,
    "cuMemGetAllocationPropertiesFromHandle": 3,
}
"""How often receiving the layout calls each at least."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def driver(library: str) -> Driver:
    return Driver(library)


@pytest.fixture(scope="module")
def peers(library: str) -> Iterator[Peers]:
    made = Peers(library)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_left(library: str, driver: Driver, peers: Peers) -> Iterator[None]:
    standin, before = ctypes.CDLL(library), held()
    yield
    standin.standin_fail(b"", 0)
    assert held() == before
    assert standin.standin_ranges() == 0
    assert [standin.standin_contexts(device) for device in range(3)] == [0, 0, 0]


def made(driver: Driver) -> list[DeviceRegion]:
    regions = [DeviceRegion.create(driver, size, 1, (1, 0)) for _, size in LAYOUT.spans]
    for index, region in enumerate(regions):
        fill(region, index)
    return regions


def test_device_memory_is_the_same_in_both_processes(driver: Driver, peers: Peers) -> None:
    regions = made(driver)
    with peers.meeting("accept", LAYOUT, batches=2) as end:
        for _ in range(2):
            offer(end, LAYOUT, regions, 10)
        told = peers.result()
    assert (told["error"], told["leaked"], told["exit"]) == (None, [], 0), told
    assert all(holds(region, 100 + i) for i, region in enumerate(regions))
    for region in regions:
        region.close()
        region.close()


def test_received_device_memory_is_written_by_the_receiver(driver: Driver, peers: Peers) -> None:
    with peers.meeting("offer", LAYOUT) as end:
        received = accept(end, LAYOUT, DeviceImporter(driver, (0,)), 10)
        assert all(holds(region, i) for i, region in enumerate(received))
        for i, region in enumerate(received):
            fill(region, 100 + i)
        told = peers.result()
    assert (told["error"], told["leaked"]) == (None, []), told
    received.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_offer_of_device_memory_is_refused(driver: Driver, peers: Peers, fault: str) -> None:
    with peers.meeting("offer", LAYOUT, fault=fault, at=2) as end:
        with pytest.raises(named(FAULTS[fault])) as failed:
            accept(end, LAYOUT, DeviceImporter(driver, (0, 1)), 10)
        end_of(end, fault)
        told = peers.result()
    del failed
    assert told.get("leaked", []) == []


@pytest.mark.parametrize("which", ["first", "middle", "last"])
@pytest.mark.parametrize("call", MAPPING)
def test_a_driver_that_refuses_is_named_and_leaves_nothing(
    library: str, driver: Driver, peers: Peers, call: str, which: str
) -> None:
    nth = {"first": 1, "middle": (MAPPING[call] + 1) // 2, "last": MAPPING[call]}[which]
    with peers.meeting("offer", LAYOUT, within_s=5.0) as end:
        ctypes.CDLL(library).standin_fail(call.encode(), nth)
        with pytest.raises(
            errors.CudaCallFailed, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY \\(2\\)"
        ) as failed:
            accept(end, LAYOUT, DeviceImporter(driver, (0, 1)), 10)
        told = peers.result()
    assert (failed.value.call, failed.value.code, failed.value.rank) == (call, 2, 0)
    assert (told["error"], told["by"], told["leaked"]) == ("CudaCallFailed", 0, []), told
    del failed


def test_what_the_driver_says_of_memory_is_checked(driver: Driver) -> None:
    region = DeviceRegion.create(driver, 2 * UNIT, 1)
    importer = DeviceImporter(driver, (0, 1))
    descriptor = region.export()
    assert not os.get_inheritable(descriptor)
    for nbytes, uuid, kind in (
        (UNIT, b"\xa1" * 16, errors.DescriptorSize),
        (3 * UNIT, b"\xa1" * 16, errors.CudaCallFailed),
        (2 * UNIT, b"\xa0" * 16, errors.DescriptorDevice),
        (2 * UNIT, b"\xa9" * 16, errors.DescriptorDevice),
    ):
        with pytest.raises(kind):
            importer.adopt(descriptor, nbytes, uuid)
    with pytest.raises(errors.DescriptorDevice, match="device 2 can't access the memory of device 1"):
        DeviceImporter(driver, (2,)).adopt(descriptor, 2 * UNIT, b"\xa1" * 16)
    os.close(descriptor)
    with pytest.raises(errors.DescriptorDevice, match="doesn't have virtual memory management"):
        DeviceRegion.create(driver, UNIT, 2)
    with pytest.raises(errors.DescriptorSize):
        DeviceRegion.create(driver, UNIT + 1, 0)
    with pytest.raises(errors.CudaCallFailed, match="cuDeviceGet: CUDA_ERROR_INVALID_VALUE"):
        DeviceRegion.create(driver, UNIT, 5)
    region.close()
    with pytest.raises(errors.DescriptorClosed):
        region.export()


def test_two_exports_are_two_files_and_a_copy_is_one(driver: Driver) -> None:
    region = DeviceRegion.create(driver, UNIT, 0)
    one, other = region.export(), region.export()
    copy = os.dup(one)
    importer = DeviceImporter(driver, (0,))
    assert importer.same(one, copy)
    assert not importer.same(one, other)
    for descriptor in (one, other, copy):
        os.close(descriptor)
    region.close()


def test_a_region_with_a_tensor_cannot_be_closed(driver: Driver) -> None:
    region = DeviceRegion.create(driver, UNIT, 0)
    # The memory of the stand-in is the host's: its tensor is one of the CPU (device type 1 of DLPack).
    tensor = dlpack_bytes(region, region.address + 16, 1024, 1, 0)
    numbers = tensor.view(torch.bfloat16).view(4, 128)
    numbers.fill_(1.5)
    due = torch.full((512,), 1.5, dtype=torch.bfloat16).view(torch.uint8).numpy()
    np.testing.assert_array_equal(bytes_of(region)[16:1040], due)
    assert (bytes_of(region)[1040:] == 0).all()
    del tensor
    with pytest.raises(errors.RegionInUse, match="1 views"):
        region.close()
    del numbers
    region.close()


def test_a_device_tensor_is_of_the_region_and_its_devices(driver: Driver) -> None:
    region = DeviceRegion.create(driver, UNIT, 0, (0,))
    with pytest.raises(errors.DescriptorDevice, match=r"from devices \(0,\), not from 1"):
        device_tensor(region, 1, torch.uint8, (4,))
    for shape, offset in (((UNIT + 1,), 0), ((4,), -1), ((1,), UNIT)):
        with pytest.raises(errors.ShapeMismatch):
            device_tensor(region, 0, torch.uint8, shape, offset)
    with pytest.raises(errors.ShapeMismatch):
        device_tensor(region, 0, torch.float32, (4,), 2)
    region.close()
    with pytest.raises(errors.DescriptorClosed):
        device_tensor(region, 0, torch.uint8, (4,))


def test_without_a_driver_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="without the CUDA driver"):
        Driver(str(tmp_path / "none.so"))
