"""Latents into a pool: RMSNorm, rotation, rounding and the scattered store in one pass.

Latents and the queries' rows come from one product: where the latter are to be normalised too, one kernel has
programs for either.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.faults import Fault, any_of, flag, report
from engine.kernels.triton.formats import AMAX_FLOOR, GROUP, convert, group_exponent, power_of_two, to_e4m3
from engine.kernels.triton.launch import ahead, await_previous
from engine.kernels.triton.norm import ELEMENTS as NORMED
from engine.kernels.triton.norm import codable, empty_rows, norm_rows, normed
from engine.kernels.triton.rope import turn_pairs, turned_by
from engine.model.coded_rows import Rows
from engine.model.row_layout import LATENT_GROUP, MAX_EXPONENT, RowLayout

ELEMENTS = 2048
"""Values of a program, in as many whole rows as fit."""
LATENT_ROW = tl.constexpr(int(Fault.LATENT_ROW))
PLAIN, ROUNDED, CODED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _stored(
    x, weight, turns, places, pool, faults, row, rows, columns, pool_rows, nope, eps, x_stride, turn_stride,
    row_size, scales_at, ROWS: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, SIZE: tl.constexpr,
    FLOOR: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Stores rows `row` [ROWS]."""
    channel = tl.arange(0, WIDE)
    held = row < rows
    factor = tl.load(weight + channel, mask=channel < columns, other=0.0)[None, :]
    await_previous()
    place = tl.load(places + row, mask=held, other=0).to(tl.int64)
    # Nothing that is read depends on the place: all is on its way at once.
    whole = held[:, None] & (channel < columns)[None, :]
    value = tl.load(x + row[:, None] * x_stride + channel[None, :], mask=whole, other=0.0)
    cosine, sine = turn_pairs(turns + (row * turn_stride)[:, None], nope, columns - nope, held, ROWS, WIDE)
    report(faults, flag(any_of((place < -1) | (place >= pool_rows)), LATENT_ROW))
    # Row 0 stays zero: absent keys point there.
    kept = held & (place > 0) & (place < pool_rows)
    inside = kept[:, None] & whole
    dtype: tl.constexpr = tl.bfloat16 if FORMAT == CODED else pool.dtype.element_ty
    value = convert(value.to(tl.float32), dtype).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None]
    value = value * factor
    value = convert(value, dtype).to(tl.float32)
    value = turned_by(value, cosine, sine)
    value = convert(value, dtype)
    coded = inside & (channel < nope)[None, :]
    if FORMAT != PLAIN:
        grouped = tl.reshape(value.to(tl.float32), (ROWS, WIDE // SIZE, SIZE))
        exponent = group_exponent(tl.maximum(tl.max(tl.abs(grouped), 2), FLOOR))
    if FORMAT == CODED:
        exponent = tl.minimum(exponent, TOP)
        at = pool + place * row_size
        code = tl.reshape(to_e4m3(grouped, exponent[:, :, None]), (ROWS, WIDE))
        tl.store(at[:, None] + channel[None, :], code.to(tl.uint8, bitcast=True), mask=coded)
        rest = (at + nope).to(tl.pointer_type(tl.bfloat16))[:, None] + (channel[None, :] - nope)
        tl.store(rest, value, mask=inside & (channel >= nope)[None, :])
        group = tl.arange(0, WIDE // SIZE)[None, :]
        byte = tl.where(group < nope // SIZE, exponent + 127, 0).to(tl.uint8)
        tl.store(at[:, None] + scales_at + group, byte, mask=kept[:, None] & (group < row_size - scales_at))
    else:
        if FORMAT == ROUNDED:
            near = to_e4m3(grouped, exponent[:, :, None]).to(tl.float32)
            near = tl.reshape(near * power_of_two(exponent)[:, :, None], (ROWS, WIDE))
            value = tl.where(coded, convert(near, dtype), value)
        tl.store(pool + (place * row_size)[:, None] + channel[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["rows", "pool_rows"])
def _store(
    x, weight, turns, places, pool, faults, rows, columns, pool_rows, nope, eps, x_stride, turn_stride,
    row_size, scales_at, ROWS: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, SIZE: tl.constexpr,
    FLOOR: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _stored(
        x, weight, turns, places, pool, faults, row, rows, columns, pool_rows, nope, eps, x_stride,
        turn_stride, row_size, scales_at, ROWS, WIDE, FORMAT, SIZE, FLOOR, TOP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "pool_rows"])
def _store_and_norm(
    x, weight, turns, places, pool, faults, q, q_weight, out, codes, scales, rows, columns, pool_rows, nope,
    q_columns, eps, x_stride, turn_stride, row_size, scales_at,
    ROWS: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr, SIZE: tl.constexpr, FLOOR: tl.constexpr,
    TOP: tl.constexpr, Q_ROWS: tl.constexpr, Q_WIDE: tl.constexpr, Q_SIZE: tl.constexpr,
):  # fmt: skip
    storing = tl.cdiv(rows, ROWS)
    if tl.program_id(0) < storing:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        _stored(
            x, weight, turns, places, pool, faults, row, rows, columns, pool_rows, nope, eps, x_stride,
            turn_stride, row_size, scales_at, ROWS, WIDE, FORMAT, SIZE, FLOOR, TOP,
        )  # fmt: skip
    else:
        own = (tl.program_id(0) - storing).to(tl.int64) * Q_ROWS + tl.arange(0, Q_ROWS)
        normed(
            q, q_weight, out, codes, scales, own, rows, q_columns, x_stride, eps, Q_ROWS, Q_WIDE, True, True,
            Q_SIZE, FLOOR,
        )  # fmt: skip


def norm_rope_store(
    x: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor, eps: float, faults: Tensor,
    simulated: bool,
) -> None:  # fmt: skip
    """RMSNorm, rotation of the last r channels, and the store of each row at its place.

    x          [T, D] in the pool's type, or float32; bfloat16 or float32 for an FP8 pool; D contiguous
    weight     [D] float32
    turns      [T, 1, r / 2] complex64
    pool       [P, D] bfloat16 or float32, or uint8 [P, row bytes] of `RowLayout(D - r, r)`; contiguous
    places     [T] int64 or int32 rows of the pool; 0 and -1 store nothing, so row 0 stays zero
    faults     [1] int32; gets Fault.LATENT_ROW where a place is outside the pool, which stores nothing either
    simulated  rounds the channels without rotation as an FP8 pool would; an FP8 pool always rounds
    raises     ShapeMismatch
    """
    way = _Way(x, weight, turns, pool, places, simulated)
    if len(x):
        _store[(way.programs,)](
            x, weight, way.pairs, places, pool, faults, *way.sizes, eps, x.stride(0), *way.steps,
            *way.constants, num_warps=4, **ahead(len(x)),
        )  # fmt: skip


def norm_and_store(
    first: Tensor, q_weight: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor, eps: float,
    faults: Tensor, simulated: bool,
) -> Rows:  # fmt: skip
    """`norm_rows` of the first Q channels of each row; its last D as `norm_rope_store` stores them.

    first     [T, Q + D] bfloat16; q_weight [Q] float32, Q a multiple of 128; the rest as of `norm_rope_store`
    raises    ShapeMismatch
    """
    wide = len(q_weight)
    q, x = first[:, :wide], first[:, wide:]
    way = _Way(x, weight, turns, pool, places, simulated)
    if not codable(q) or not len(x):
        norm_rope_store(x, weight, turns, pool, places, eps, faults, simulated)
        return norm_rows(q, q_weight, eps)
    out = empty_rows(q)
    q_wide = triton.next_power_of_2(wide)
    block = max(1, NORMED // q_wide)
    _store_and_norm[(way.programs + triton.cdiv(len(x), block),)](
        x, weight, way.pairs, places, pool, faults, q, q_weight, out.values, out.codes, out.scales,
        *way.sizes, wide, eps, x.stride(0), *way.steps, *way.constants, block, q_wide, GROUP, num_warps=4,
        **ahead(len(x)),
    )  # fmt: skip
    return out


class _Way:
    """How rows are stored: programs, and the kernels' arguments. raises ShapeMismatch"""

    def __init__(
        self, x: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor, simulated: bool
    ) -> None:
        rows, columns = x.shape
        rotary = 2 * turns.shape[-1]
        nope = columns - rotary
        coded = pool.dtype == torch.uint8
        layout = RowLayout(nope, rotary) if coded or simulated else None
        width = layout.row_bytes if coded and layout else columns
        if (
            pool.dim() != 2 or pool.shape[1] != width or not pool.is_contiguous() or not len(pool)
            or x.stride(1) != 1 or weight.shape != (columns,) or turns.shape != (rows, 1, rotary // 2)
            or turns.dtype != torch.complex64 or places.shape != (rows,)
            or x.dtype not in _accepted(pool.dtype)
        ):  # fmt: skip
            raise ShapeMismatch(
                f"x {x.dtype} {tuple(x.shape)}, weight {tuple(weight.shape)}, turns {tuple(turns.shape)}, "
                f"places {tuple(places.shape)}, pool {pool.dtype} {tuple(pool.shape)}; a row takes {width}"
            )
        self.pairs = torch.view_as_real(turns.squeeze(1).contiguous())
        wide = max(triton.next_power_of_2(columns), LATENT_GROUP)
        block = max(1, ELEMENTS // wide)
        form = CODED.value if coded else ROUNDED.value if simulated else PLAIN.value
        self.programs = triton.cdiv(rows, block)
        self.sizes = rows, columns, pool.shape[0], nope
        self.steps = self.pairs.stride(0), width, layout.scales_at if layout else 0
        self.constants = block, wide, form, LATENT_GROUP, AMAX_FLOOR, MAX_EXPONENT


def _accepted(kept: torch.dtype) -> tuple[torch.dtype, ...]:
    """Types of x that a pool of type `kept` takes."""
    return (torch.float32, torch.bfloat16) if kept == torch.uint8 else (torch.float32, kept)
