"""Host memory that processes share: a memfd of sealed size, so that no mapping can lose its pages."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import errors
from engine.transport import NO_DEVICE, Kind

PAGE_BYTES = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Exactly these; with the last one nobody can add a seal against writing later."""


def available_bytes() -> int:
    """What the system says that it can give without swapping."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


class HostRegion:
    """Bytes of a memfd, mapped shared. Made by `create` on one side, by HostImporter on the other.

    nbytes     a multiple of PAGE_BYTES
    writable   whether this process may write
    """

    kind = Kind.MEMFD
    device_uuid = NO_DEVICE

    def __init__(self, descriptor: int, nbytes: int, writable: bool) -> None:
        self.nbytes, self.writable = nbytes, writable
        self._pid = os.getpid()
        self._descriptor = -1
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=access)
        except (OSError, ValueError) as error:
            raise errors.DescriptorSyscall(f"mapping {nbytes} bytes: {error}") from error

    @staticmethod
    def create(nbytes: int) -> HostRegion:
        """Zeroed memory that is there (not on first touch). raises DescriptorSize, DescriptorSyscall."""
        if nbytes <= 0 or nbytes % PAGE_BYTES:
            raise errors.DescriptorSize(f"{nbytes} bytes are no whole pages of {PAGE_BYTES}")
        # A memfd has no limit of its own: the system would kill processes for pages that aren't there.
        free = available_bytes()
        if nbytes > free:
            raise errors.DescriptorSyscall(f"{nbytes} bytes of shared memory: {free} are available")
        descriptor = -1
        try:
            descriptor = os.memfd_create("engine-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(descriptor, 0, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            region = HostRegion(descriptor, nbytes, writable=True)
        except BaseException as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise errors.DescriptorSyscall(f"{nbytes} bytes of shared memory: {error}") from error
            raise
        region._descriptor = descriptor
        return region

    def array(self, dtype: npt.DTypeLike, shape: Sequence[int], offset: int = 0) -> npt.NDArray[Any]:
        """A view; the region can't be closed while it lives.

        raises ShapeMismatch, DescriptorClosed, DescriptorForked
        """
        self._check_usable()
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if offset < 0 or min(shape, default=1) < 0 or offset + count * kind.itemsize > self.nbytes:
            raise errors.ShapeMismatch(
                f"{tuple(shape)} of {kind} at {offset} don't fit in {self.nbytes} bytes"
            )
        return np.frombuffer(self._map, kind, count, offset).reshape(tuple(shape))

    def export(self) -> int:
        """As Region.export; of the side that made it."""
        self._check_usable()
        if self._descriptor < 0:
            raise errors.DescriptorClosed("received memory is handed on by who made it, not by this process")
        return os.dup(self._descriptor)

    def close(self) -> None:
        """As Region.close. In a forked child: of the child's own mapping."""
        try:
            self._map.close()
        except BufferError as error:
            raise errors.RegionInUse(f"{self.nbytes} bytes of host memory: {error}") from error
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise errors.DescriptorForked(f"process {os.getpid()} used the memory of {self._pid}")
        if self._map.closed:
            raise errors.DescriptorClosed("the region is closed")


class HostImporter:
    """Receives host memory; `writable` is the right that this process takes."""

    kind = Kind.MEMFD

    def __init__(self, writable: bool = True) -> None:
        self._writable = writable

    def check(self, descriptor: int, nbytes: int) -> None:
        """As Importer.check."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise errors.DescriptorKind(f"a file that can't be sealed is no host memory: {error}") from error
        if seals != SEALS:
            raise errors.DescriptorUnsealed(f"seals {seals:#x}, not {SEALS:#x}")
        found = os.fstat(descriptor).st_size
        if found != nbytes:
            raise errors.DescriptorSize(f"memory of {found} bytes; {nbytes} were declared")

    def same(self, one: int, other: int) -> bool:
        """As Importer.same."""
        return os.path.samestat(os.fstat(one), os.fstat(other))

    def adopt(self, descriptor: int, nbytes: int, device_uuid: bytes) -> HostRegion:
        """As Importer.adopt."""
        return HostRegion(descriptor, nbytes, self._writable)
