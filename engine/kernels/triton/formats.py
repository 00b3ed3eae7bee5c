"""Number formats inside kernels: e8m0 scales, the scale of a group, packed e2m1 codes.

Source: the Open Compute Project's microscaling formats 1.0, and engine/model/quant.py, which is their oracle.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 128
"""Activations share a scale in groups of so many channels; weights in squares of it."""
FP4_GROUP = 32
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter cuts digits off where the device rounds: here kernels round by hand before they convert."""
AMAX_FLOOR = 1e-4
"""The least magnitude a group's scale is made for."""


@triton.jit
def power_of_two(exponent):
    """2^exponent as float32, exactly; int32 within [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(raw):
    """Scale bytes as float32. Byte 255 (NaN) is refused at loading and never comes here."""
    biased = raw.to(tl.int32)
    # 2^-127 is a subnormal of float32: the top bit of the mantissa.
    return tl.where(biased == 0, 0x00400000, biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def group_exponent(amax):
    """Least e with 448 2^e >= amax, from the bits of amax: exact, no division. amax is normal, float32."""
    bits = amax.to(tl.int32, bitcast=True)
    # 448 is 1.75 times 2^8, and 0x600000 the mantissa of 1.75.
    return (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def _cut(x, DIGITS: tl.constexpr):
    """x rounded to nearest, ties to even, as if its last DIGITS mantissa bits weren't there."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (DIGITS - 1)) - 1 + ((bits >> DIGITS) & 1)
    return (bits >> DIGITS << DIGITS).to(tl.float32, bitcast=True)


@triton.jit
def convert(x, DTYPE: tl.constexpr):
    """float32 x as DTYPE, float32 or bfloat16, rounded to nearest."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        x = _cut(x, 16)
    return x.to(DTYPE)


@triton.jit
def product(a, b, total):
    """total + a b in float32; the interpreter would multiply the bits of bfloat16."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def to_e4m3(x, exponent):
    """x / 2^exponent in e4m3, saturating at 448; exponent broadcasts against x, both float32 and int32."""
    scaled = x * power_of_two(-exponent)
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    if INTERPRETED:
        # Below 2^-6 the step is 2^-9: what is added there pushes smaller digits out.
        scaled = tl.where(tl.abs(scaled) < 0.015625, scaled + 24576.0 - 24576.0, _cut(scaled, 20))
    return scaled.to(tl.float8e4nv)


_DECODE = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $4, 6;
and.b32 a, a, 0x01C001C0;
shl.b32 b, $4, 12;
lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, $4, 2;
and.b32 a, a, 0x01C001C0;
shl.b32 b, $4, 8;
lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 $1, a, $5;
shr.b32 a, $4, 2;
and.b32 a, a, 0x01C001C0;
shl.b32 b, $4, 4;
lop3.b32 a, a, b, 0x80008000, 0xF8;
mul.rn.bf16x2 $2, a, $5;
shr.b32 a, $4, 6;
and.b32 a, a, 0x01C001C0;
lop3.b32 a, a, $4, 0x80008000, 0xF8;
mul.rn.bf16x2 $3, a, $5;
}""")
"""Two words of four codes at a time: each code's magnitude to bits 6 to 8, its sign to bit 15."""


@triton.jit
def _times(bits, factor):
    """As bfloat16 bits times factor, by way of float32; the interpreter would multiply the bits."""
    wide = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return (wide * factor.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def decode_e2m1(code, scale, SCALE_GROUP: tl.constexpr):
    """Four bfloat16 [N, C]: columns 4j, 4j + 1, 4j + 2 and 4j + 3, times their scale and 2^-32.

    code   int16 [N, C]: e2m1 codes of four columns, the first in the lowest bits
    scale  uint8 [N, 4 C / SCALE_GROUP]: e8m0, at most 160
    """
    n: tl.constexpr = code.shape[0]
    groups: tl.constexpr = scale.shape[1]
    size: tl.constexpr = SCALE_GROUP // 4
    # As bfloat16 bits an e2m1 code is its value times 2^-126, the subnormal one included. What is left of
    # 2^(scale - 127 + 126), after 32 of it, stays in the normal range.
    factor = ((scale.to(tl.int16) + 94) << 7).to(tl.bfloat16, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (n, groups, size)), (n, groups * size))
    if INTERPRETED:
        bits = code.to(tl.int32)
        v0 = _times(((bits & 7) << 6) | ((bits & 8) << 12), factor)
        v1 = _times(((bits >> 4 & 7) << 6) | ((bits >> 4 & 8) << 12), factor)
        v2 = _times(((bits >> 8 & 7) << 6) | ((bits >> 8 & 8) << 12), factor)
        v3 = _times(((bits >> 12 & 7) << 6) | ((bits >> 12 & 8) << 12), factor)
    else:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            _DECODE,
            "=r,=r,=r,=r,r,r",
            [code, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return v0, v1, v2, v3
