"""Reading FP8 rows of latents (`engine.model.row_layout`) within a kernel."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.formats import INTERPRETED, power_of_two

_DECODE = tl.constexpr("""{
.reg .b32 a, b;
.reg .pred p;
setp.eq.u32 p, $3, 0;
prmt.b32 a, $2, 0, 0x1404;
shr.b32 b, a, 4;
and.b32 b, b, 0x07F007F0;
lop3.b32 b, b, a, 0x80008000, 0xF8;
mul.rn.bf16x2 b, b, $3;
selp.b32 $0, $5, b, p;
prmt.b32 a, $2, 0, 0x3424;
shr.b32 b, a, 4;
and.b32 b, b, 0x07F007F0;
lop3.b32 b, b, a, 0x80008000, 0xF8;
mul.rn.bf16x2 b, b, $4;
selp.b32 $1, $6, b, p;
}""")
"""Four codes: each one's magnitude to bits 4 to 10 of a bfloat16, its sign to bit 15, times a factor; where
that is zero, the channel as it is stored."""


@triton.jit
def load_v4_rows(pool, row):
    """bfloat16 [N, 512], exact, of the FP8 rows [N] int64 of a pool of DeepSeek-V4's layout."""
    n: tl.constexpr = row.shape[0]
    at = pool + row * 584
    # Codes of the last 64 channels are half of the rotated ones' bytes: read, and then not used.
    code = tl.load(at[:, None] + tl.arange(0, 512)[None, :])
    rest = tl.load((at + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, 64)[None, :])
    scales = tl.load((at + 576).to(tl.pointer_type(tl.int64)))
    group = tl.arange(0, 8)[None, :]
    exponent = ((scales[:, None] >> (group * 8).to(tl.int64)) & 255).to(tl.int32)
    rest = tl.reshape(tl.broadcast_to(rest[:, None, :], (n, 8, 64)), (n, 512))
    if INTERPRETED:
        factor = tl.broadcast_to(power_of_two(exponent - 127)[:, :, None], (n, 8, 64))
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.reshape(factor, (n, 512))
        value = tl.where(tl.arange(0, 512)[None, :] < 448, value.to(tl.bfloat16), rest)
    else:
        # As bfloat16 bits a code is its value times 2^-120, the subnormal one included.
        factor = tl.where(group < 7, (exponent + 120) << 7, 0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (n, 8, 64)), (n, 512))
        value = tl.inline_asm_elementwise(
            _DECODE, "=r,=r,r,r,r,r,r", [code, factor, rest], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return value
