"""RMSNorm over rows. Source: torch's rms_norm in float32, one rounding at the end."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import convert

ELEMENTS = 4096
"""Values of a program, in as many whole rows as fit."""


@triton.jit
def _rms_norm(
    x, weight, out, rows, columns, x_stride, eps,
    ROWS: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDE)
    held = (row < rows)[:, None] & (channel < columns)[None, :]
    value = tl.load(x + row[:, None] * x_stride + channel[None, :], mask=held, other=0.0).to(tl.float32)
    turned = value * tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None]
    if WEIGHTED:
        turned = turned * tl.load(weight + channel, mask=channel < columns, other=0.0)[None, :]
    tl.store(
        out + row[:, None] * columns + channel[None, :], convert(turned, out.dtype.element_ty), mask=held
    )


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
    wide = triton.next_power_of_2(columns)
    block = max(1, ELEMENTS // wide)
    rows = flat.shape[0]
    if rows:
        _rms_norm[(triton.cdiv(rows, block),)](
            flat, weight, out, rows, columns, flat.stride(0), eps, block, wide, weight is not None,
            num_warps=8 if wide >= 2048 else 4,
        )  # fmt: skip
    return out
