"""Products with FP8 weights, plain and in groups.

Weights are e4m3 with one e8m0 scale for 128x128 values; activations e4m3 with one scale for 128 channels of
a row, or bfloat16. Each step of 128 channels is one product of raw codes, whose float32 sum is scaled and
added. Source: DeepSeek-V4's block-scaled products; few rows swap the operands, so that weights fill the
matrix unit's long side, and split the channels over programs.
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
from engine.kernels.triton.quantise import quantise
from engine.model.quantised import Fp8Weight

SUM_BLOCK = 1024


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
    CODED: tl.constexpr, SIZE: tl.constexpr,
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
    group = first // rank
    x_at = x + t_read[:, None] * x_stride + (group * columns + k)[None, :]
    w_at = w + n_read[:, None] * columns + k[None, :]
    ws_at = w_scales + first // SIZE * steps
    xs_at = x_scales + t_read * s_stride + group * steps
    total = tl.zeros((OUTPUTS, ROWS) if SWAP else (ROWS, OUTPUTS), tl.float32)
    for step in range(begin, tl.minimum(begin + share, steps)):
        weight = tl.load(w_at + step * SIZE)
        value = tl.load(x_at + step * SIZE)
        factor = decode_e8m0(tl.load(ws_at + step))
        if CODED:
            factor = factor * tl.load(xs_at + step)
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
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(out + at, convert(total, out.dtype.element_ty), mask=at < size)


def shape_for(rows: int, outputs: int, columns: int, multiprocessors: int) -> LinearShape:
    """A cut for a product of this size: enough programs to fill the device, few enough to read x rarely."""
    if rows > 256:
        return LinearShape(64, 128, 1, False, 4, 4)
    if rows > 64:
        wide = 128 if outputs >= 2048 else 64
        cut = LinearShape(128, wide, 1, False, 8 if wide == 128 else 4, 3)
        enough = multiprocessors - 8
    else:
        tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
        cut = LinearShape(tile, 128 if tile == 64 else 64, 1, True, 4, 4)
        enough = 2 * multiprocessors
    blocks, split = triton.cdiv(rows, cut.rows) * triton.cdiv(outputs, cut.outputs), 1
    while split < 8 and blocks * split < enough and columns // GROUP >= 8 * split:
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
    """As linear_fp8 on what `quantise` gives: codes [T, groups K], scales [T, groups K / 128]."""
    return _product(codes, scales, weight, shape)


def linear_bf16(x: Tensor, weight: Fp8Weight, shape: LinearShape | None = None) -> Tensor:
    """x [T, groups K] bfloat16, as it is, times FP8 weights as bfloat16 (exact); bfloat16 [T, N].

    raises  ShapeMismatch
    """
    return _product(x, x, weight, shape)


def _product(x: Tensor, scales: Tensor, weight: Fp8Weight, shape: LinearShape | None) -> Tensor:
    outputs, columns = weight.codes.shape
    if x.dim() != 2 or x.shape[1] != weight.groups * columns or x.stride(1) != 1:
        raise ShapeMismatch(f"x is {tuple(x.shape)}; the weight takes [T, {weight.groups} x {columns}]")
    rows = x.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return out
    cut = shape or shape_for(rows, outputs, columns, multiprocessors(x.device))
    parts = out if cut.split == 1 else torch.empty(cut.split, rows, outputs, device=x.device)
    grid = (triton.cdiv(rows, cut.rows), triton.cdiv(outputs, cut.outputs), cut.split)
    _linear[grid](
        x, scales, weight.codes, weight.scales, parts, rows, outputs, columns, x.stride(0), scales.stride(0),
        outputs // weight.groups, cut.rows, cut.outputs, cut.split, cut.swap, scales is not x, GROUP,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if cut.split > 1:
        _sum[(triton.cdiv(out.numel(), SUM_BLOCK),)](parts, out, out.numel(), cut.split, SUM_BLOCK)
    return out


def multiprocessors(device: torch.device) -> int:
    """Of the device; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
