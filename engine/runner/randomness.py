"""Counter-based random numbers: a function of (request seed, child, position, purpose), never of the batch.

The bits come from four rounds of the 64-bit finaliser of splitmix64 (Steele, Lea, Flood 2014), one a word of
the key.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_UNIFORM_BITS = 48
_PURPOSE_BITS = 8


class Purpose(IntEnum):
    """What a number is drawn for; two purposes at one position never share a number."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def request_keys(seeds: Tensor, children: Tensor) -> Tensor:
    """The part of the key that lives as long as a request, int64 [R]; both arguments are int64 [R]."""
    return _absorb(_absorb(torch.zeros_like(seeds), seeds), children)


def random_bits(keys: Tensor, positions: Tensor, purpose: Purpose, draw: int = 0) -> Tensor:
    """64 random bits a row, int64 [R]; keys are of `request_keys`, positions int64 [R].

    draw  which of several numbers for one purpose at one position
    """
    return _absorb(_absorb(keys, positions), torch.full_like(keys, int(purpose) | draw << _PURPOSE_BITS))


def uniforms(keys: Tensor, positions: Tensor, purpose: Purpose, draw: int = 0) -> Tensor:
    """Uniform float64 [R], strictly inside (0, 1), on a grid of 2^-48; arguments as of `random_bits`."""
    top = _shift_right(random_bits(keys, positions, purpose, draw), 64 - _UNIFORM_BITS)
    return (top.to(torch.float64) + 0.5) * 2.0**-_UNIFORM_BITS


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    return _mix((state ^ word) + _GOLDEN)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, count: int) -> Tensor:
    # int64 shifts are arithmetic: the mask drops the copies of the sign bit.
    return (z >> count) & ((1 << (64 - count)) - 1)
