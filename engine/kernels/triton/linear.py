"""Products with FP8 weights, plain and in groups.

Weights are e4m3 with one e8m0 scale for 128x128 values; activations e4m3 with one scale for 128 channels of
a row, or bfloat16. Each step of 128 channels is one product of raw codes, whose float32 sum is scaled and
added. Few rows swap the operands, so that weights fill the matrix unit's long side, and split the channels
over programs; one row and many have products of their own, in `one_row.py` and by the `library.py`.
Source: DeepSeek-V4's block-scaled products.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import GROUP, convert, decode_e8m0, product
from engine.kernels.triton.launch import AHEAD, await_previous, prefetch
from engine.kernels.triton.library import library_bf16, library_coded, takes
from engine.kernels.triton.one_row import one_row
from engine.kernels.triton.quantise import quantise
from engine.model.quantised import Fp8Weight

SUM_BLOCK = 1024
MANY_ROWS = 128
"""Beyond it the library is faster. Measured on an H200, as are the cuts below."""
LINES = 8
"""Steps whose weights are fetched while the kernel ahead ends."""


@dataclass(frozen=True)
class LinearShape:
    """How a product is cut: rows and outputs of a program, split of the channels, orientation, pipeline."""

    rows: int
    outputs: int
    split: int
    swap: bool
    warps: int
    stages: int


@triton.jit
def _linear(
    x, x_scales, w, w_scales, out, rows, outputs, columns, x_stride, s_stride, rank,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    CODED: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * OUTPUTS
    n = first + tl.arange(0, OUTPUTS)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, SIZE)
    # Lanes beyond the end read row 0 and are never stored: no mask in the loop.
    n_read = tl.where(n < outputs, n, 0).to(tl.int64)
    t_read = tl.where(t < rows, t, 0).to(tl.int64)
    steps = columns // SIZE
    share = tl.cdiv(steps, SPLIT)
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, steps)
    if LINES > 0:
        line = tl.minimum(begin + tl.arange(0, LINES), steps - 1)
        prefetch(w + n_read[:, None] * columns + (line * SIZE)[None, :])
    await_previous()
    group = first // rank
    x_at = x + t_read[:, None] * x_stride + (group * columns + k)[None, :]
    w_at = w + n_read[:, None] * columns + k[None, :]
    ws_at = w_scales + first // SIZE * steps
    xs_at = x_scales + t_read * s_stride + group * steps
    total = tl.zeros((OUTPUTS, ROWS) if SWAP else (ROWS, OUTPUTS), tl.float32)
    # Scales are loaded a step ahead: unlike codes, they aren't by themselves.
    first_step = tl.minimum(begin, steps - 1)
    coming = decode_e8m0(tl.load(ws_at + first_step))
    if CODED:
        coming = coming * tl.load(xs_at + first_step)
    for step in range(begin, end):
        weight = tl.load(w_at + step * SIZE)
        value = tl.load(x_at + step * SIZE)
        factor = coming
        ahead = tl.minimum(step + 1, steps - 1)
        coming = decode_e8m0(tl.load(ws_at + ahead))
        if CODED:
            coming = coming * tl.load(xs_at + ahead)
        else:
            weight = weight.to(tl.bfloat16)
        if SWAP:
            part = product(weight, tl.trans(value), None)
            total += part * factor[None, :] if CODED else part * factor
        else:
            part = product(value, tl.trans(weight), None)
            total += part * factor[:, None] if CODED else part * factor
    if SWAP:
        total = tl.trans(total)
    at = (tl.program_id(2).to(tl.int64) * rows + t[:, None]) * outputs + n[None, :]
    held = (t < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out + at, convert(total, out.dtype.element_ty), mask=held)


@triton.jit
def _sum(parts, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    await_previous()
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(out + at, convert(total, out.dtype.element_ty), mask=at < size)


def shape_for(
    rows: int, outputs: int, columns: int, multiprocessors: int, *, coded: bool = True
) -> LinearShape:
    """A cut for a product of this size: enough programs to fill the device, few enough to read x rarely.

    coded   as of FP8 codes; bfloat16 leaves room for fewer stages
    """
    large = outputs >= 16384 or (rows > 64 and outputs * columns >= 1 << 25)
    wide = 128 if large else 64
    if rows > MANY_ROWS:
        return LinearShape(64, 128, 1, False, 4, 4 if coded else 3)
    if rows > 64 and not coded:
        # Read as bfloat16, x is what costs: each program takes all rows.
        cut = LinearShape(MANY_ROWS, 128, 1, True, 8, 3)
    elif rows > 32:
        cut = LinearShape(64, wide, 1, False, 4, 3 if not coded else 4 if large else 5)
    else:
        cut = LinearShape(16 if rows <= 16 else 32, wide, 1, True, 4, 4)
    blocks, split = triton.cdiv(rows, cut.rows) * triton.cdiv(outputs, cut.outputs), 1
    # Two programs for each multiprocessor, or one of eight warps, or nearly, and eight steps for each.
    room = multiprocessors * 8 // cut.warps - 8
    while split < 8 and blocks * split < room and columns // GROUP >= 16 * split:
        split *= 2
    return replace(cut, split=split)


def linear_fp8(x: Tensor, weight: Fp8Weight, shape: LinearShape | None = None) -> Tensor:
    """x [T, groups K] times weight, x quantised on the way; bfloat16 [T, N].

    raises  ShapeMismatch
    """
    return linear_coded(*quantise(x), weight, shape)


def linear_coded(
    codes: Tensor, scales: Tensor, weight: Fp8Weight, shape: LinearShape | None = None
) -> Tensor:
    """As linear_fp8 on what `quantise` gives: codes [T, groups K], scales [T, groups K / 128].

    shape   of the kernel that is for any number of rows; without it the fastest way is taken
    raises  ShapeMismatch
    """
    _check(codes, weight)
    if shape is None and len(codes) == 1:
        return one_row(codes, scales, weight)
    if shape is None and len(codes) > MANY_ROWS and takes(codes, weight):
        return library_coded(codes, scales, weight)
    return _product(codes, scales, weight, shape)


def linear_bf16(x: Tensor, weight: Fp8Weight, shape: LinearShape | None = None) -> Tensor:
    """x [T, groups K] bfloat16, as it is, times FP8 weights as bfloat16 (exact); bfloat16 [T, N].

    shape   as of linear_coded
    raises  ShapeMismatch
    """
    _check(x, weight)
    if shape is None and len(x) == 1:
        return one_row(x, None, weight)
    if shape is None and len(x) > MANY_ROWS and takes(x, weight):
        return library_bf16(x, weight)
    return _product(x, x, weight, shape)


def _check(x: Tensor, weight: Fp8Weight) -> None:
    """raises  ShapeMismatch"""
    columns = weight.codes.shape[1]
    if x.dim() != 2 or x.shape[1] != weight.groups * columns or x.stride(1) != 1:
        raise ShapeMismatch(f"x is {tuple(x.shape)}; the weight takes [T, {weight.groups} x {columns}]")


def _product(x: Tensor, scales: Tensor, weight: Fp8Weight, shape: LinearShape | None) -> Tensor:
    (outputs, columns), rows, coded = weight.codes.shape, len(x), scales is not x
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return out
    cut = shape or shape_for(rows, outputs, columns, multiprocessors(x.device), coded=coded)
    parts = out if cut.split == 1 else torch.empty(cut.split, rows, outputs, device=x.device)
    grid = (triton.cdiv(rows, cut.rows), triton.cdiv(outputs, cut.outputs), cut.split)
    _linear[grid](
        x, scales, weight.codes, weight.scales, parts, rows, outputs, columns, x.stride(0), scales.stride(0),
        outputs // weight.groups, cut.rows, cut.outputs, cut.split, cut.swap, coded, GROUP,
        LINES if cut.swap else 0, num_warps=cut.warps, num_stages=cut.stages, **AHEAD,
    )  # fmt: skip
    if cut.split > 1:
        grid = (triton.cdiv(out.numel(), SUM_BLOCK), 1, 1)
        _sum[grid](parts, out, out.numel(), cut.split, SUM_BLOCK, **AHEAD)
    return out


def multiprocessors(device: torch.device) -> int:
    """Of the device; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
