"""Number formats inside kernels: e8m0 scales, the scale of a group, words of e2m1 codes.

Source: the Open Compute Project's microscaling formats 1.0, and engine/model/quant.py, which is their oracle.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 128
"""Activations share a scale in groups of so many channels; weights in squares of it."""
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
.reg .b32 m, s;
and.b32 m, $2, 0x77777777;
prmt.b32 $0, $3, $7, m;
shr.u32 m, m, 16;
prmt.b32 $1, $3, $7, m;
lop3.b32 $0, $2, 0x80808080, $0, 0xEA;
shl.b32 s, $2, 4;
lop3.b32 $1, s, 0x80808080, $1, 0xEA;
}""")
"""A word of eight codes: each magnitude looks a byte up among the eight of $3 and $7, then come the signs."""


@triton.jit
def _decode_interpreted(code, scale):
    """As decode_words, in float32: the interpreter has no inline assembly."""
    n: tl.constexpr = code.shape[0]
    place = tl.arange(0, 4)
    words = tl.reshape(code.to(tl.int32), (n, 16, 4))
    word = tl.sum(words << (8 * place)[None, None, :], 2)[:, :, None]
    # As float32 bits a magnitude at bit 22 is its value times 2^-126, the subnormal one included.
    low = ((word >> (4 * place)[None, None, :]) & 7) << 22
    high = ((word >> (4 * place + 16)[None, None, :]) & 7) << 22
    low |= ((word >> (8 * place + 7)[None, None, :]) & 1) << 31
    high |= ((word >> (8 * place + 3)[None, None, :]) & 1) << 31
    factor = power_of_two((scale & 15).to(tl.int32) - 5)
    factor = tl.reshape(tl.broadcast_to(factor[:, None, :, None], (n, 4, 4, 4)), (n, 64))
    v0 = tl.reshape(low, (n, 64)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    v1 = tl.reshape(high, (n, 64)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return v0 * factor, v1 * factor


@triton.jit
def decode_words(code, scale):
    """e4m3 [N, 128] of words of eight codes: of all words the first four channels, then of all the others.

    code   uint8 [N, 64], scale uint8 [N, 4], as `expert_layout` lays them: values are multiplied by 2^6 over
           the largest of the four scales
    """
    n: tl.constexpr = code.shape[0]
    if INTERPRETED:
        v0, v1 = _decode_interpreted(code, scale)
    else:
        # The table is 0, 0.5, 1, 1.5, 2, 3, 4, 6 times 2^-5 as e4m3; eight more in a byte are a power of two.
        power = (scale & 15).to(tl.int32)
        low = power * 0x08080800 + 0x14100800
        high = power * 0x08080808 + 0x24201C18
        low = tl.reshape(tl.broadcast_to(low[:, None, :, None], (n, 4, 4, 4)), (n, 64))
        high = tl.reshape(tl.broadcast_to(high[:, None, :, None], (n, 4, 4, 4)), (n, 64))
        v0, v1 = tl.inline_asm_elementwise(
            _DECODE,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [code, low, high],
            dtype=(tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    return tl.reshape(tl.permute(tl.join(v0, v1), (0, 2, 1)), (n, 128))


@triton.jit
def largest_scale(word):
    """2^26 times the largest of four scales of `expert_layout`, 2^32 times what decode_words leaves out.

    word  int32: the four bytes of a row's block
    """
    # The low half goes from bit 4 to bit 23, the high one from bit 12 to bit 27.
    return (((word & 0xF0) << 19) + ((word & 0xF000) << 15)).to(tl.float32, bitcast=True)
