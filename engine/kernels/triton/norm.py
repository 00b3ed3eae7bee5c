"""RMSNorm over rows, with FP8 codes where products follow.

Source: torch's rms_norm in float32, one rounding at the end.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.coded import coded
from engine.kernels.triton.formats import AMAX_FLOOR, GROUP, convert
from engine.kernels.triton.launch import ahead, await_previous
from engine.model.coded_rows import CodedRows, Rows

ELEMENTS = 4096
"""Values of a program, in as many whole rows as fit."""


@triton.jit
def normed(
    x, weight, out, codes, scales, row, rows, columns, x_stride, eps,
    ROWS: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODED: tl.constexpr, SIZE: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    """Stores rows `row` [ROWS], normalised, and their codes if so wanted."""
    channel = tl.arange(0, WIDE)
    held = (row < rows)[:, None] & (channel < columns)[None, :]
    if WEIGHTED:
        factor = tl.load(weight + channel, mask=channel < columns, other=0.0)[None, :]
    await_previous()
    value = tl.load(x + row[:, None] * x_stride + channel[None, :], mask=held, other=0.0).to(tl.float32)
    turned = value * tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None]
    if WEIGHTED:
        turned = turned * factor
    turned = convert(turned, out.dtype.element_ty)
    at = row[:, None] * columns + channel[None, :]
    tl.store(out + at, turned, mask=held)
    if CODED:
        code, scale = coded(tl.reshape(turned, (ROWS * WIDE,)), ROWS * WIDE, SIZE, FLOOR)
        tl.store(codes + at, tl.reshape(code, (ROWS, WIDE)), mask=held)
        group, groups = tl.arange(0, WIDE // SIZE)[None, :], columns // SIZE
        scale = tl.reshape(scale, (ROWS, WIDE // SIZE))
        tl.store(scales + row[:, None] * groups + group, scale, mask=(row < rows)[:, None] & (group < groups))


@triton.jit
def _rms_norm(
    x, weight, out, codes, scales, rows, columns, x_stride, eps,
    ROWS: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr, CODED: tl.constexpr, SIZE: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    normed(
        x, weight, out, codes, scales, row, rows, columns, x_stride, eps, ROWS, WIDE, WEIGHTED, CODED, SIZE,
        FLOOR,
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension of x; x's type and shape.

    x       [..., N] bfloat16 or float32; leading dimensions lie evenly, the last one contiguous
    weight  [N] float32, or none
    raises  ShapeMismatch
    """
    columns = x.shape[-1]
    flat = x if x.dim() == 2 else x.reshape(-1, columns)
    if flat.stride(1) != 1 or (weight is not None and tuple(weight.shape) != (columns,)):
        raise ShapeMismatch(f"x is {tuple(x.shape)} with strides {x.stride()}; the weight must fit it")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(flat, weight, eps, out, out, out, coded=False)
    return out


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Rows:
    """RMSNorm of x [T, K], with the codes of FP8 products where K is a multiple of 128 and x bfloat16.

    weight  [K] float32
    raises  ShapeMismatch
    """
    if not codable(x):
        return rms_norm(x, weight, eps)
    if x.stride(1) != 1 or tuple(weight.shape) != (x.shape[1],):
        raise ShapeMismatch(f"x is {tuple(x.shape)} with strides {x.stride()}; the weight must fit it")
    out = empty_rows(x)
    _run(x, weight, eps, out.values, out.codes, out.scales, coded=True)
    return out


def codable(x: Tensor) -> bool:
    """Whether x [T, K] has codes: products take bfloat16 in whole groups of channels."""
    return x.dtype == torch.bfloat16 and x.shape[1] % GROUP == 0


def empty_rows(like: Tensor) -> CodedRows:
    """Of the shape and type of `like` [T, K], contiguous."""
    (rows, columns), device = like.shape, like.device
    return CodedRows(
        torch.empty(rows, columns, dtype=like.dtype, device=device),
        torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, columns // GROUP, dtype=torch.float32, device=device),
    )


def _run(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, codes: Tensor, scales: Tensor, *, coded: bool
) -> None:
    rows, columns = x.shape
    wide = triton.next_power_of_2(columns)
    block = max(1, ELEMENTS // wide)
    if rows:
        _rms_norm[(triton.cdiv(rows, block),)](
            x, weight, out, codes, scales, rows, columns, x.stride(0), eps, block, wide, weight is not None,
            coded, GROUP, AMAX_FLOOR, num_warps=8 if wide >= 2048 else 4, **ahead(rows),
        )  # fmt: skip
