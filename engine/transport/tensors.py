"""Shared regions as tensors, without a copy; a region can't be closed while one of them lives."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import DescriptorDevice, ShapeMismatch
from engine.transport.device import DeviceRegion
from engine.transport.memory import HostRegion

_CUDA, _UINT = 2, 1
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


_held: dict[int, tuple[Any, ...]] = {}
"""By address of the DLPack record: what must outlive its tensor."""


def _let_go(record: int) -> None:
    _, _, region = _held.pop(record)
    region.unhold()


_drop = _Deleter(_let_go)


def host_tensor(region: HostRegion, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
    """A tensor on the CPU; `offset` in bytes. The region must be writable: torch knows no other tensors.

    raises ShapeMismatch, DescriptorClosed, DescriptorForked
    """
    if not region.writable:
        raise ShapeMismatch("torch has no tensors that can't be written; take the region's array")
    nbytes = _nbytes(dtype, shape, offset, region.nbytes)
    return torch.from_numpy(region.array("uint8", (nbytes,), offset)).view(dtype).view(tuple(shape))


def device_tensor(
    region: DeviceRegion, device: int, dtype: torch.dtype, shape: Sequence[int], offset: int = 0
) -> Tensor:
    """A tensor on `device`, one of the region's `access`, wherever the memory is; `offset` in bytes.

    Kernels on it run on `device` and reach the memory directly. raises ShapeMismatch, DescriptorDevice,
    DescriptorClosed, DescriptorForked
    """
    region.check_usable()
    if device not in region.access:
        raise DescriptorDevice(f"the memory may be used from devices {region.access}, not from {device}")
    nbytes = _nbytes(dtype, shape, offset, region.nbytes)
    flat = dlpack_bytes(region, region.address + offset, nbytes, _CUDA, device)
    return flat.view(dtype).view(tuple(shape))


def dlpack_bytes(region: Any, address: int, nbytes: int, device_type: int, device: int) -> Tensor:
    """uint8 [nbytes] at an address, device as DLPack has it. Holds `region` until the last view is gone."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    strides = (ctypes.c_int64 * 1)(1)
    record = _Managed(_Tensor(address, device_type, device, 1, _UINT, 8, 1, shape, strides, 0), None, _drop)
    at = ctypes.addressof(record)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    region.hold()
    _held[at] = (record, (shape, strides), region)
    try:
        return torch.utils.dlpack.from_dlpack(make(at, _NAME, None))
    except BaseException:
        if at in _held:
            _let_go(at)
        raise


def _nbytes(dtype: torch.dtype, shape: Sequence[int], offset: int, room: int) -> int:
    nbytes = math.prod(shape) * dtype.itemsize
    if offset < 0 or offset % dtype.itemsize or min(shape, default=1) < 0 or offset + nbytes > room:
        raise ShapeMismatch(f"{tuple(shape)} of {dtype} at byte {offset} don't fit in {room} bytes")
    return nbytes
