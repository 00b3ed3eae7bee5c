"""Indices that point outside: kernels read and write nothing through them, and say so in one flag.

The flag is an int32 on the device that every kernel of a step may add bits to, or simply set to one; the
host reads it with the step's results. A row of 0 or -1, or a slot of -1, is padding where a docstring says
so, and no fault: plans that are zeroed and partly filled are legal.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from enum import IntFlag

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import CollectiveFailed, PageAccounting


class Fault(IntFlag):
    """What pointed outside, or PEER: another rank that did not write in time; the bits of the flag."""

    LATENT_ROW = 1
    RING_ROW = 2
    HALF = 4
    STEP_ROW = 8
    SLOT = 16
    OUT_ROW = 32
    KEY_ROW = 64
    LENGTH = 128
    PEER = 256


LATENT_ROW = tl.constexpr(int(Fault.LATENT_ROW))
RING_ROW = tl.constexpr(int(Fault.RING_ROW))
HALF = tl.constexpr(int(Fault.HALF))
STEP_ROW = tl.constexpr(int(Fault.STEP_ROW))
SLOT = tl.constexpr(int(Fault.SLOT))
OUT_ROW = tl.constexpr(int(Fault.OUT_ROW))
KEY_ROW = tl.constexpr(int(Fault.KEY_ROW))
LENGTH = tl.constexpr(int(Fault.LENGTH))
PEER = tl.constexpr(int(Fault.PEER))


@triton.jit
def any_of(lanes):
    """Whether any of these lanes is true; a scalar."""
    return tl.max(lanes.to(tl.int32), 0) > 0


@triton.jit
def flag(outside, BIT: tl.constexpr):
    """BIT where the scalar `outside` is true, else 0; int32."""
    return tl.where(outside, BIT, 0)


@triton.jit
def report(faults, bits):
    """Adds bits, an int32 scalar, to the flag."""
    if bits != 0:
        tl.atomic_or(faults, bits, sem="relaxed")


def no_faults(device: torch.device | str) -> Tensor:
    """A flag without bits: int32 [1]."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def check_faults(bits: int) -> None:
    """The flag, as the host read it.

    raises  CollectiveFailed where another rank's device was silent, PageAccounting that names what pointed
            outside
    """
    if bits == Fault.PEER:
        raise CollectiveFailed("a device waited in vain for rows from another rank's")
    if bits:
        raise PageAccounting(f"a kernel met indices outside: {Fault(bits)!r}")
