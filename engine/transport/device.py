"""Device memory that processes of a host share: allocations of CUDA's virtual memory management."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from contextlib import ExitStack

from engine import errors
from engine.transport import Kind
from engine.transport.cuda import INVALID_VALUE, NOT_SUPPORTED, Driver


class DeviceRegion:
    """Mapped device memory. Made by `create` on one side, by DeviceImporter on the other.

    address   where this process and its devices find it; multiple of the granularity
    home      the device that has the memory
    access    the devices that may read and write it

    The device must have finished all work on it before `close`.
    """

    kind = Kind.CUDA_VMM

    def __init__(self, driver: Driver, handle: int, nbytes: int, home: int, access: tuple[int, ...]) -> None:
        """Takes the handle, also where it raises CudaCallFailed, DescriptorSize, DescriptorDevice."""
        self.nbytes, self.home, self.access = nbytes, home, access
        self._driver, self._handle, self._pid = driver, handle, os.getpid()
        self._views, self._counting = 0, threading.Lock()
        with ExitStack() as undo:
            undo.callback(driver.release, handle)
            self.device_uuid = driver.uuid(home)
            for device in access:
                driver.check_reaches(device, home)
                driver.retain(device)
                undo.callback(driver.let_go, device)
            unit = driver.granularity(home)
            _check_not_larger(driver, handle, nbytes, unit)
            self.address = driver.reserve(nbytes, unit)
            undo.callback(driver.free, self.address, nbytes)
            driver.map(self.address, nbytes, handle)
            undo.callback(driver.unmap, self.address, nbytes)
            driver.set_access(self.address, nbytes, access)
            self._undo = undo.pop_all()
        self._open = True

    @staticmethod
    def create(driver: Driver, nbytes: int, home: int, access: tuple[int, ...] | None = None) -> DeviceRegion:
        """New memory on `home`, not cleared. raises DescriptorSize, DescriptorDevice, CudaCallFailed."""
        driver.check_supports(home)
        unit = driver.granularity(home)
        if nbytes <= 0 or nbytes % unit:
            raise errors.DescriptorSize(f"{nbytes} bytes are no multiple of the device's {unit}")
        return DeviceRegion(driver, driver.create(nbytes, home), nbytes, home, access or (home,))

    def export(self) -> int:
        """As Region.export; each has a file of its own."""
        self.check_usable()
        return self._driver.export(self._handle)

    def close(self) -> None:
        """As Region.close: unmaps, frees the addresses, lets contexts go, releases. raises CudaCallFailed."""
        if not self._open:
            return
        if os.getpid() != self._pid:
            raise errors.DescriptorForked(f"process {os.getpid()} closed the device memory of {self._pid}")
        if self._views:
            raise errors.RegionInUse(f"{self.nbytes} bytes of device memory have {self._views} views")
        self._open = False
        self._undo.close()

    def check_usable(self) -> None:
        """raises DescriptorForked, DescriptorClosed."""
        if os.getpid() != self._pid:
            raise errors.DescriptorForked(f"process {os.getpid()} used the device memory of {self._pid}")
        if not self._open:
            raise errors.DescriptorClosed("the region is closed")

    def hold(self) -> None:
        """A view begins; the region can't be closed until `unhold`."""
        with self._counting:
            self._views += 1

    def unhold(self) -> None:
        """A view ended."""
        with self._counting:
            self._views -= 1


class DeviceImporter:
    """Receives device memory for the devices in `access` (ordinals of this process)."""

    kind = Kind.CUDA_VMM

    def __init__(self, driver: Driver, access: tuple[int, ...]) -> None:
        self._driver, self._access = driver, access

    def check(self, descriptor: int, nbytes: int) -> None:
        """As Importer.check. What the driver's own files are is its affair; they are no plain ones."""
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISFIFO(mode):
            raise errors.DescriptorKind(f"a descriptor with mode {mode:#o} is no device memory")

    def same(self, one: int, other: int) -> bool:
        """As Importer.same. The driver's files may all be one node of /dev; status flags are each file's own.

        Each export opens a file anew, so that nobody else is looking at these flags.
        """
        before = fcntl.fcntl(one, fcntl.F_GETFL)
        other_before = fcntl.fcntl(other, fcntl.F_GETFL)
        fcntl.fcntl(one, fcntl.F_SETFL, before ^ os.O_APPEND)
        try:
            return fcntl.fcntl(other, fcntl.F_GETFL) != other_before
        finally:
            fcntl.fcntl(one, fcntl.F_SETFL, before)

    def adopt(self, descriptor: int, nbytes: int, device_uuid: bytes) -> DeviceRegion:
        """As Importer.adopt. raises DescriptorDevice, DescriptorSize, CudaCallFailed."""
        home = self._driver.device_of(device_uuid)
        handle = self._driver.import_handle(descriptor)
        try:
            found = self._driver.home(handle)
            if found != home:
                raise errors.DescriptorDevice(f"the memory is on device {found}, not on {home}")
        except BaseException:
            self._driver.release(handle)
            raise
        return DeviceRegion(self._driver, handle, nbytes, home, self._access)


def _check_not_larger(driver: Driver, handle: int, nbytes: int, unit: int) -> None:
    """The driver doesn't tell a handle's size, but maps no more than there is. raises DescriptorSize."""
    address = driver.reserve(nbytes + unit, unit)
    try:
        driver.map(address, nbytes + unit, handle)
    except errors.CudaCallFailed as error:
        # Drivers differ in how they refuse; one that refuses every size says so when the memory is mapped.
        if error.code not in (INVALID_VALUE, NOT_SUPPORTED):
            raise
    else:
        driver.unmap(address, nbytes + unit)
        raise errors.DescriptorSize(f"the memory is larger than the declared {nbytes} bytes")
    finally:
        driver.free(address, nbytes + unit)
