"""Sparse attention of many queries over FP8 rows, for compute capability 9.0: some warps copy keys, some
decode them, and some multiply, all at once.

What `attend_kernels` does one after the other in each tile takes here little longer than its products. The
cut is fixed but for the tiles of a part. It is written in Gluon, which can't be interpreted.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from engine.kernels.triton.attend_products import HEADS, ROW, multiply
from engine.kernels.triton.attend_tiles import FLAT_ROWS, KEYS, copy_tiles, decode_tiles
from engine.kernels.triton.gluon_names import copy_ahead

DECODING, COPYING = gl.constexpr(72), gl.constexpr(40)
"""Registers of the threads of four warps each, which leaves 200 to the eight warps that multiply."""
WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
SIZES = [
    "queries", "heads", "turn_stride", "w_columns", "w_stride", "w_share", "w_size", "c_columns", "c_stride",
    "c_share", "c_size", "tiles",
]  # fmt: skip
LISTS = ["w_rows", "w_seen", "c_rows", "c_seen"]


@gluon.jit
def _range(seen, query, columns, RANGED: gl.constexpr):
    """The columns [first, end) of the row list that the query sees, and how many tiles that makes."""
    first, end = 0, columns
    if RANGED:
        first = gl.maximum(gl.load(seen + query * 2), 0)
        end = gl.minimum(first + gl.load(seen + query * 2 + 1), columns)
    return first, end, (gl.maximum(end - first, 0) + KEYS - 1) // KEYS


@gluon.jit
def _copy_queries(q, own, query, block, heads, q_stride, head_stride):
    """Begins to copy a query's heads, bfloat16 [HEADS, 512]; absent heads are zeros."""
    head = block * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY))
    channel = gl.arange(0, 256, layout=gl.SliceLayout(0, QUERY))
    for half in gl.static_range(2):
        at = q + query * q_stride + head.to(gl.int64)[:, None] * head_stride + (half * 256 + channel)[None, :]
        copy_ahead(own.slice(half * 256, 256, dim=1), at, mask=(head < heads)[:, None])
    async_copy.commit_group()


@gluon.jit
def _barriers(MANY: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that are passed once COUNT threads have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [MANY, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(MANY):
        mbarrier.init(barriers.index(each), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LISTS)
def _attend_coded(
    q, sink, turns, out, totals, faults, w_pool, w_rows, w_seen, c_pool, c_rows, c_seen,
    queries, heads, q_stride, head_stride, turn_stride, w_columns, w_stride, w_share, w_size,
    c_columns, c_stride, c_share, c_size, tiles, scale,
    W_RANGED: gl.constexpr, C_RANGED: gl.constexpr, TURNED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    blocks = (heads + HEADS - 1) // HEADS
    query, block = (gl.program_id(0) // blocks).to(gl.int64), gl.program_id(0) % blocks
    w_first, w_end, w_tiles = _range(w_seen, query, w_columns, W_RANGED)
    c_first, c_end, c_tiles = _range(c_seen, query, c_columns, C_RANGED)
    begin, last = gl.program_id(1) * tiles, w_tiles + c_tiles
    if SPLIT:
        last = gl.minimum(last, begin + tiles)
    own = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 512], WIDE)
    shares = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], WIDE)
    k0 = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 256], WIDE)
    k1 = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 128], WIDE)
    k2 = gl.allocate_shared_memory(gl.bfloat16, [KEYS, 128], WIDE)
    rows = gl.allocate_shared_memory(gl.int32, [4, KEYS], FLAT)
    raw0 = gl.allocate_shared_memory(gl.int64, [KEYS, 32], FLAT_ROWS)
    raw1 = gl.allocate_shared_memory(gl.int64, [KEYS, 16], FLAT_ROWS)
    raw2 = gl.allocate_shared_memory(gl.int64, [KEYS, 8], FLAT_ROWS)
    rest = gl.allocate_shared_memory(gl.int64, [KEYS, 16], FLAT_ROWS)
    scales = gl.allocate_shared_memory(gl.int64, [2, KEYS], FLAT)
    # Each of 128 threads that copy tells by itself that its words are there.
    landed, free = _barriers(3, 128), _barriers(3, 1)
    standing, used, third_used = _barriers(2, 1), _barriers(2, 1), _barriers(1, 1)
    _copy_queries(q, own, query, block, heads, q_stride, head_stride)
    head = block * HEADS + gl.arange(0, HEADS, layout=ROW)
    place = query * heads + head
    if SPLIT:
        place += gl.program_id(1).to(gl.int64) * queries * heads
    # Told in place: a tuple with a name would make values of constants.
    gl.warp_specialize(
        [
            (multiply, (
                sink, turns + query * turn_stride, out, totals, place, head, scale, heads, begin, last, own,
                k0, k1, k2, shares, rows, standing, used, third_used, TURNED, SPLIT,
            )),
            (decode_tiles, (
                begin, last, k0, k1, k2, raw0, raw1, raw2, rest, scales, landed, free, standing, used,
                third_used,
            )),
            (copy_tiles, (
                w_pool.to(gl.pointer_type(gl.int64)), c_pool.to(gl.pointer_type(gl.int64)),
                w_rows + query // w_share * w_stride, c_rows + query // c_share * c_stride, w_first, w_end,
                c_first, c_end, w_tiles, w_size, c_size, begin, last, faults, rows, raw0, raw1, raw2, rest,
                scales, landed, free,
            )),
        ],
        [4, 4],
        [DECODING, COPYING],
    )  # fmt: skip
