"""What becomes of a pooled entry before it is stored: norm, rotation, rounding; and the pools that take it.

Every step rounds as `TorchOps.rms_norm`, `rotate` and `Rounding` do. Source: DeepSeek-V4's compressors.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import AMAX_FLOOR, convert, group_exponent, power_of_two, to_e4m3
from engine.model.row_layout import LATENT_GROUP, MAX_EXPONENT, RowLayout

PLAIN = tl.constexpr(0)
"""Values are stored as they are."""
ROUNDED = tl.constexpr(1)
"""Values are stored as the number format would give them back, in the pool's type."""
CODED = tl.constexpr(2)
"""Codes and scales are stored."""
KEY_GROUP = 32
FLOOR, TOP = tl.constexpr(AMAX_FLOOR), tl.constexpr(MAX_EXPONENT)
SIZE = tl.constexpr(LATENT_GROUP)


@triton.jit
def normed(pooled, weight, width, eps, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """RMSNorm of one row [WIDE], zero beyond `width`; rounded to DTYPE before and after, float32."""
    channel = tl.arange(0, WIDE)
    value = convert(pooled, DTYPE).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = value * tl.load(weight + channel, mask=channel < width, other=0.0)
    return convert(value, DTYPE).to(tl.float32)


@triton.jit
def rotated(value, turns, width, half, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Pairs (2i, 2i + 1) of the last 2 half of `width` channels turned by half cosines and sines in turn."""
    place = tl.arange(0, WIDE // 2) - (width // 2 - half)
    turned = (place >= 0) & (place < half)
    cosine = tl.load(turns + 2 * place, mask=turned, other=1.0)
    sine = tl.load(turns + 2 * place + 1, mask=turned, other=0.0)
    x, y = tl.split(tl.reshape(value, (WIDE // 2, 2)))
    value = tl.reshape(tl.join(x * cosine - y * sine, x * sine + y * cosine), (WIDE,))
    return convert(value, DTYPE).to(tl.float32)


@triton.jit
def transformed(value, factor, DTYPE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr):
    """The Hadamard transform of WIDE = 2^STAGES values, times factor."""
    for _ in tl.static_range(STAGES):
        # Neighbours' sums go before their differences: the lowest bit of a place becomes the highest, and
        # after all stages each bit is back where it was.
        x, y = tl.split(tl.reshape(value, (WIDE // 2, 2)))
        value = tl.reshape(tl.trans(tl.join(x + y, x - y)), (WIDE,))
    return convert(value * factor, DTYPE).to(tl.float32)


@triton.jit
def e2m1_rounded(value, WIDE: tl.constexpr, GROUP: tl.constexpr):
    """value through e2m1 and back, a power-of-two scale each GROUP; midpoints go towards zero."""
    groups = tl.reshape(value, (WIDE // GROUP, GROUP))
    # The floor is 6 times 2^-126.
    bits = tl.maximum(tl.max(tl.abs(groups), 1), 7.052966104933725e-38).to(tl.int32, bitcast=True)
    # The least e with 6 2^e at least the largest; 6 is 1.5 times 2^2, and 0x400000 the mantissa of 1.5.
    exponent = ((bits >> 23) - 129 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32))[:, None]
    size = tl.abs(groups) * power_of_two(-exponent)
    near = 0.5 * ((size > 0.25).to(tl.float32) + (size > 0.75).to(tl.float32))
    near += 0.5 * ((size > 1.25).to(tl.float32) + (size > 1.75).to(tl.float32))
    near += (size > 2.5).to(tl.float32) + (size > 3.5).to(tl.float32) + 2.0 * (size > 5.0).to(tl.float32)
    near = near * power_of_two(exponent)
    return tl.reshape(tl.where(groups < 0, -near, near), (WIDE,))


@triton.jit
def store_latent(value, pool, row, width, nope, row_size, scales_at, FORM: tl.constexpr, WIDE: tl.constexpr):
    """Stores one latent [WIDE] in a row of the pool, as `LatentRows` says."""
    channel = tl.arange(0, WIDE)
    if FORM != PLAIN:
        groups = tl.reshape(value, (WIDE // SIZE, SIZE))
        exponent = group_exponent(tl.maximum(tl.max(tl.abs(groups), 1), FLOOR))
    if FORM == CODED:
        exponent = tl.minimum(exponent, TOP)
        at = pool + row * row_size
        codes = tl.reshape(to_e4m3(groups, exponent[:, None]), (WIDE,))
        tl.store(at + channel, codes.to(tl.uint8, bitcast=True), mask=channel < nope)
        rest = (at + nope + 2 * (channel - nope)).to(tl.pointer_type(tl.bfloat16))
        tl.store(rest, convert(value, tl.bfloat16), mask=(channel >= nope) & (channel < width))
        group = tl.arange(0, WIDE // SIZE)
        byte = tl.where(group < nope // SIZE, exponent + 127, 0).to(tl.uint8)
        tl.store(at + scales_at + group, byte, mask=group < row_size - scales_at)
    else:
        if FORM == ROUNDED:
            near = to_e4m3(groups, exponent[:, None]).to(tl.float32) * power_of_two(exponent)[:, None]
            value = tl.where(channel < nope, tl.reshape(near, (WIDE,)), value)
        near = convert(value, pool.dtype.element_ty)
        tl.store(pool + row * row_size + channel, near, mask=channel < width)


@triton.jit
def store_key(
    value, values, scales, row, width, factor,
    FORM: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Stores one index key [WIDE] as an `IndexPool` holds it."""
    channel = tl.arange(0, WIDE)
    if FORM == CODED:
        value = transformed(value, factor, tl.bfloat16, WIDE, STAGES)
        scale = tl.maximum(tl.max(tl.abs(value), 0), FLOOR) / 448.0
        codes = to_e4m3(value / scale, tl.zeros((1,), tl.int32))
        tl.store(values + row * width + channel, codes)
        tl.store(scales + row, scale)
    else:
        if FORM == ROUNDED:
            value = transformed(value, factor, values.dtype.element_ty, WIDE, STAGES)
            value = e2m1_rounded(value, WIDE, GROUP)
        near = convert(value, values.dtype.element_ty)
        tl.store(values + row * width + channel, near, mask=channel < width)


@dataclass(frozen=True)
class LatentRows:
    """How a pool of latents is written.

    form       PLAIN, ROUNDED or CODED
    row_size   elements from row to row
    scales_at  byte of a row's first scale, where coded
    wide       lanes of a row
    """

    form: int
    row_size: int
    scales_at: int
    wide: int


def latent_rows(pool: Tensor, width: int, nope: int, simulated: bool) -> LatentRows:
    """The way into a pool.

    pool       [P, D] bfloat16 or float32, or uint8 [P, row bytes] of `RowLayout(nope, D - nope)`; contiguous
    simulated  rounds the channels without rotation as an FP8 pool would; an FP8 pool always rounds
    raises     ShapeMismatch where the pool doesn't take latents of `width`, `nope` of them unrotated
    """
    coded = pool.dtype == torch.uint8
    layout = RowLayout(nope, width - nope) if coded or simulated else None
    size = layout.row_bytes if coded and layout else width
    if pool.dim() != 2 or pool.shape[1] != size or not pool.is_contiguous():
        raise ShapeMismatch(
            f"pool {pool.dtype} {tuple(pool.shape)}; a latent of {width} takes rows of {size}"
        )
    form = CODED if coded else ROUNDED if simulated else PLAIN
    wide = max(LATENT_GROUP, triton.next_power_of_2(width))
    return LatentRows(int(form.value), size, layout.scales_at if layout else 0, wide)


@dataclass(frozen=True)
class IndexPool:
    """Where index keys of Di channels go.

    values   [P, Di] bfloat16 or float32; where coded, float8_e4m3fn
    rounded  values are transformed (Hadamard) and kept as FP4 with a scale for 32 channels would give them
    scales   where coded, float32 [P]: codes of the transformed key are to be multiplied by it; else none
    """

    values: Tensor
    rounded: bool = False
    scales: Tensor | None = None

    @property
    def form(self) -> int:
        """PLAIN, ROUNDED or CODED."""
        return int(CODED.value if self.scales is not None else ROUNDED.value if self.rounded else PLAIN.value)

    def check(self, width: int) -> None:
        """raises ShapeMismatch where the pool doesn't take keys of `width` channels"""
        rows, own = self.values.shape
        short = self.scales is not None and tuple(self.scales.shape) != (rows,)
        if own != width or not self.values.is_contiguous() or short:
            raise ShapeMismatch(f"an index pool of {rows} x {own} for keys of {width} channels")
        if self.form != PLAIN.value and (width % KEY_GROUP or width & (width - 1)):
            raise ShapeMismatch(f"keys of {width} channels: the transform takes a power of two from 32 on")


def turn_pairs(turns: Tensor) -> Tensor:
    """turns complex64 [E, 1, r / 2] as float32 [E, r]: cosine and sine of each pair in turn."""
    return torch.view_as_real(turns).flatten(1)
