"""Tiles of keys for `attend_coded`: some warps copy rows of FP8 pools, others decode them for matrix units.

A tile has 64 keys. Of its rows, 256, 128 and 64 coded channels and the 64 rotated ones are taken each in
words of 8 bytes, so that neighbours in a warp read and write neighbouring bytes. What copies doesn't decode:
before matrix units read what a warp has stored it must wait for all that it has under way, copies too.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from engine.kernels.triton.faults import KEY_ROW
from engine.kernels.triton.gluon_names import barrier, copy_ahead, recast

KEYS = gl.constexpr(64)
WORDS = gl.constexpr(73)
"""Words of 8 bytes of a row: 56 of codes, 16 of rotated channels, one of scales."""
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
EIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 64, 2))
"""What matrix units read as bfloat16, by pairs and by words."""
FLAT_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


def _halves(word: str, first: int) -> str:
    """PTX of the four codes of a word, to results `first` and the next one."""
    return f"""and.b32 z, {word}, 0x7F7F7F7F;
and.b32 y, {word}, 0x80808080;
prmt.b32 a, z, 0, 0x4140;
prmt.b32 b, y, 0, 0x1404;
mad.lo.u32 a, a, 16, b;
mul.rn.bf16x2 ${first}, a, $5;
prmt.b32 a, z, 0, 0x4342;
prmt.b32 b, y, 0, 0x3424;
mad.lo.u32 a, a, 16, b;
mul.rn.bf16x2 ${first + 1}, a, $5;
"""


_DECODE = gl.constexpr(f"""{{
.reg .b32 lo, hi, z, y, a, b;
mov.b64 {{lo, hi}}, $4;
{_halves("lo", 0)}{_halves("hi", 2)}}}""")
"""Eight codes: magnitudes to bits 4 to 10 of a bfloat16 by a multiplication, which is another pipe's work,
signs to bit 15; and a pair of factors times each pair."""


@gluon.constexpr_function
def _words(COUNT):
    """Layout of [KEYS, COUNT] words over four warps."""
    lanes = min(COUNT, 32)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _groups(COUNT):
    """Layout of [KEYS, COUNT / 8, 8]: the same words in the same threads, by groups of a scale."""
    lanes = min(COUNT, 32)
    return gl.BlockedLayout([1, 1, 1], [32 // lanes, lanes // 8, 8], [4, 1, 1], [2, 1, 0])


@gluon.jit
def _rows_of(
    w_rows, c_rows, w_first, w_end, c_first, c_end, w_tiles, w_size, c_size, tile, bad
):  # fmt: skip
    """Pool rows of a tile, int32 [KEYS], 0 where there is none; and `bad` with those outside marked."""
    near = tile < w_tiles
    column = gl.where(near, w_first + tile * KEYS, c_first + (tile - w_tiles) * KEYS)
    column += gl.arange(0, KEYS, layout=LIST)
    # Lists may be of two types: one of two loads is masked off, and adds zero.
    row = gl.load(w_rows + column, mask=column < gl.where(near, w_end, 0), other=0).to(gl.int64)
    row += gl.load(c_rows + column, mask=column < gl.where(near, 0, c_end), other=0).to(gl.int64)
    size = gl.where(near, w_size, c_size)
    bad |= ((row < -1) | (row >= size)).to(gl.int32)
    return gl.where((row > 0) & (row < size), row, 0).to(gl.int32), bad


@gluon.jit
def _copy(pool, rows, raw, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Begins to copy words [KEYS, COUNT] from FIRST on of the rows that shared memory tells."""
    layout: gl.constexpr = _words(COUNT)
    row = rows.load(gl.SliceLayout(1, layout)).to(gl.int64)
    word = gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))
    copy_ahead(raw, (pool + (row * WORDS + FIRST))[:, None] + word[None, :])


@gluon.jit
def copy_tiles(
    w_words, c_words, w_rows, c_rows, w_first, w_end, c_first, c_end, w_tiles, w_size, c_size, begin, last,
    faults, rows, raw0, raw1, raw2, rest, scales, landed, free,
):  # fmt: skip
    """Copies one tile after the other, in three portions; each goes where its like has been decoded.

    rows          int32 [4, KEYS], for the warps that multiply too; 0 is a key that isn't there
    landed, free  three barriers: the portion is there, and may be overwritten
    """
    bad = gl.zeros([KEYS], gl.int32, layout=LIST)
    row, bad = _rows_of(
        w_rows, c_rows, w_first, w_end, c_first, c_end, w_tiles, w_size, c_size, begin, bad
    )  # fmt: skip
    rows.index(0).store(row)
    barrier()
    for tile in range(begin, last):
        j = tile - begin
        row, bad = _rows_of(
            w_rows, c_rows, w_first, w_end, c_first, c_end, w_tiles, w_size, c_size, tile + 1, bad
        )  # fmt: skip
        pool, own = gl.where(tile < w_tiles, w_words, c_words), rows.index(j & 3)
        mbarrier.wait(free.index(0), (j & 1) ^ 1)
        _copy(pool, own, raw0, 0, 32)
        copy_ahead(scales.index(j & 1), pool + (own.load(LIST).to(gl.int64) * WORDS + 72))
        async_copy.mbarrier_arrive(landed.index(0), increment_count=False)
        mbarrier.wait(free.index(1), (j & 1) ^ 1)
        _copy(pool, own, raw1, 32, 16)
        async_copy.mbarrier_arrive(landed.index(1), increment_count=False)
        mbarrier.wait(free.index(2), (j & 1) ^ 1)
        _copy(pool, own, raw2, 48, 8)
        _copy(pool, own, rest, 56, 16)
        async_copy.mbarrier_arrive(landed.index(2), increment_count=False)
        rows.index((j + 1) & 3).store(row)
        barrier()
    if gl.max(bad, 0) > 0:
        gl.atomic_or(faults, KEY_ROW, sem="relaxed")


@gluon.jit
def _decoded(raw, scales, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Pairs of bfloat16, int32 [KEYS, 4 COUNT], of words from FIRST on; scales uint8 [KEYS, 8]."""
    layout: gl.constexpr = _words(COUNT)
    groups: gl.constexpr = _groups(COUNT)
    words = raw.load(layout)
    scale = scales.slice(FIRST // 8, COUNT // 8, dim=1).load(gl.SliceLayout(2, groups)).to(gl.int32)
    # As bfloat16 bits a code is its value times 2^-120; 2^(scale - 127 + 120) makes up for it, twice.
    factor = ((scale + 120) * 0x800080)[:, :, None] + gl.zeros([KEYS, COUNT // 8, 8], gl.int32, layout=groups)
    factor = gl.convert_layout(gl.reshape(factor, [KEYS, COUNT]), layout)
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,=r,=r,l,r", [words, factor], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(gl.join(p0, p2), gl.join(p1, p3)), [KEYS, 4 * COUNT])


@gluon.jit
def decode_tiles(
    begin, last, k0, k1, k2, raw0, raw1, raw2, rest, scales, landed, free, standing, used, third_used,
):  # fmt: skip
    """Decodes tiles to bfloat16 [KEYS, 256], [KEYS, 128] (both in two places by turns) and [KEYS, 128].

    standing, used  by turns: the tile is there, and its first two parts may be overwritten
    third_used      the third part may be
    """
    first = recast(k0, gl.int32, [2, KEYS, 128], PAIRS)
    second = recast(k1, gl.int32, [2, KEYS, 64], PAIRS)
    third = recast(k2, gl.int32, [KEYS, 64], PAIRS)
    rotated = recast(k2, gl.int64, [KEYS, 32], EIGHTS)
    bytes_of = recast(scales, gl.uint8, [2, KEYS, 8], FLAT_ROWS)
    for tile in range(begin, last):
        j = tile - begin
        now = j & 1
        mbarrier.wait(used.index(now), ((j >> 1) & 1) ^ 1)
        mbarrier.wait(landed.index(0), now)
        first.index(now).store(_decoded(raw0, bytes_of.index(now), 0, 32))
        barrier()
        mbarrier.arrive(free.index(0), count=1)
        mbarrier.wait(landed.index(1), now)
        second.index(now).store(_decoded(raw1, bytes_of.index(now), 32, 16))
        barrier()
        mbarrier.arrive(free.index(1), count=1)
        mbarrier.wait(landed.index(2), now)
        mbarrier.wait(third_used.index(0), now ^ 1)
        third.slice(0, 32, dim=1).store(_decoded(raw2, bytes_of.index(now), 48, 8))
        rotated.slice(16, 16, dim=1).store(rest.load(_words(16)))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free.index(2), count=1)
        mbarrier.arrive(standing.index(now), count=1)
