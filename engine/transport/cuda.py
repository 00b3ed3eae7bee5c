"""CUDA's driver calls for memory that has a descriptor: libcuda through ctypes, with every result checked.

Nothing of CUDA is needed to build or to import this; without the library, making a Driver fails.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from engine.errors import ConfigError, CudaCallFailed, DescriptorDevice

INVALID_VALUE, NOT_SUPPORTED = 1, 801
_PINNED, _ON_DEVICE, _POSIX, _READ_WRITE = 1, 1, 1, 3
_SUPPORTS = {102: "virtual memory management", 103: "memory with POSIX descriptors"}
"""By number of the device's attribute."""


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(_Properties), c_uint64),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
}


class Driver:
    """The driver of this machine. Devices are ordinals as this process sees them; sizes are in bytes.

    Every method raises CudaCallFailed. The constructor also raises ConfigError, without a driver.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _CALLS.items():
                getattr(self._library, name).argtypes = arguments
            self._library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
        except (OSError, AttributeError) as error:
            raise ConfigError(f"device memory can't be shared without the CUDA driver: {error}") from error
        self._call("cuInit", 0)

    def devices(self) -> int:
        """How many there are."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def uuid(self, device: int) -> bytes:
        """16 bytes."""
        uuid = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", uuid, self._device(device))
        return uuid.raw

    def device_of(self, uuid: bytes) -> int:
        """raises DescriptorDevice where this process doesn't see it."""
        for device in range(self.devices()):
            if self.uuid(device) == uuid:
                return device
        raise DescriptorDevice(f"this process doesn't see device {uuid.hex()}")

    def check_supports(self, device: int) -> None:
        """raises DescriptorDevice where its memory can't have a descriptor."""
        for attribute, what in _SUPPORTS.items():
            supported = c_int()
            self._call("cuDeviceGetAttribute", byref(supported), attribute, self._device(device))
            if not supported.value:
                raise DescriptorDevice(f"device {device} doesn't have {what}")

    def check_reaches(self, device: int, home: int) -> None:
        """raises DescriptorDevice where `device` can't access the memory of `home`."""
        reaches = c_int(device == home)
        if device != home:
            own, other = self._device(device), self._device(home)
            self._call("cuDeviceCanAccessPeer", byref(reaches), own, other)
        if not reaches.value:
            raise DescriptorDevice(f"device {device} can't access the memory of device {home}")

    def retain(self, device: int) -> None:
        """Keeps the device's primary context, which torch uses too."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(device))

    def let_go(self, device: int) -> None:
        """Ends a `retain`."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device(device))

    def granularity(self, device: int) -> int:
        """Sizes and addresses of allocations are multiples of it."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(_properties(device)), 0)
        return size.value

    def create(self, nbytes: int, device: int) -> int:
        """A handle of new memory that may have a descriptor."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), nbytes, byref(_properties(device)), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """The memory goes when nothing maps it and no process has a handle or descriptor."""
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """A new descriptor, closed on exec."""
        descriptor = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(descriptor), handle, _POSIX, 0)
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def import_handle(self, descriptor: int) -> int:
        """The handle of a descriptor's memory; the descriptor stays the caller's."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _POSIX)
        return handle.value

    def home(self, handle: int) -> int:
        """The device that has the memory. raises DescriptorDevice where none has."""
        found = _Properties()
        self._call("cuMemGetAllocationPropertiesFromHandle", byref(found), handle)
        if found.location.type != _ON_DEVICE:
            raise DescriptorDevice(f"the memory is at a place of type {found.location.type}, not on a device")
        return int(found.location.id)

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Addresses without memory."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, alignment, 0, 0)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Ends a `reserve`."""
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Puts memory at reserved addresses; nobody has access yet."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Ends a `map`."""
        self._call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int, devices: tuple[int, ...]) -> None:
        """Lets the devices read and write."""
        rights = (_Access * len(devices))(*(_Access(_Location(_ON_DEVICE, d), _READ_WRITE) for d in devices))
        self._call("cuMemSetAccess", address, nbytes, rights, len(devices))

    def _device(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        return device.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            reason = c_char_p()
            self._library.cuGetErrorName(code, byref(reason))
            told = (reason.value or b"an unknown error").decode()
            raise CudaCallFailed(f"{name}: {told} ({code})", name, code)


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_POSIX, location=_Location(_ON_DEVICE, device))
