"""Products of one row with FP8 weights: no matrix unit, as there is nothing to share a weight among.

A program holds the whole row in registers and loads all weights of its few outputs at once, before the kernel
ahead has ended. Sums are float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.formats import GROUP, convert, decode_e8m0
from engine.kernels.triton.launch import AHEAD, await_previous
from engine.model.quantised import Fp8Weight

BYTES = 16384
"""Of a program's weights. Measured on an H200."""
LOADED = tl.constexpr(16)
"""Weights that a thread loads at once: as many products are added up before their scale comes in."""


@triton.jit
def _linear_row(
    x, x_scales, w, w_scales, out, outputs, columns, rank,
    OUTPUTS: tl.constexpr, WIDE: tl.constexpr, CODED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OUTPUTS
    group = first // rank
    n = first + tl.arange(0, OUTPUTS)
    k = tl.arange(0, WIDE)
    held = k < columns
    at = w + n.to(tl.int64)[:, None] * columns + k[None, :]
    weight = tl.load(at, mask=held[None, :] & (n < outputs)[:, None], other=0.0)
    part = tl.arange(0, WIDE // LOADED) * LOADED
    # A program's outputs lie in one square of scales.
    square = w_scales + first // SIZE * (columns // SIZE) + part // SIZE
    factor = decode_e8m0(tl.load(square, mask=part < columns, other=0))
    await_previous()
    value = tl.load(x + group * columns + k, mask=held, other=0.0).to(tl.float32)
    if CODED:
        scale_at = x_scales + group * (columns // SIZE) + part // SIZE
        factor = factor * tl.load(scale_at, mask=part < columns, other=0.0)
    products = tl.reshape(weight.to(tl.float32) * value[None, :], (OUTPUTS, WIDE // LOADED, LOADED))
    total = tl.sum(tl.sum(products, 2) * factor[None, :], 1)
    tl.store(out + n, convert(total, out.dtype.element_ty), mask=n < outputs)


def one_row(x: Tensor, scales: Tensor | None, weight: Fp8Weight) -> Tensor:
    """As `linear_coded`, or without scales `linear_bf16`, on one row x [1, groups K]; bfloat16 [1, N]."""
    outputs, columns = weight.codes.shape
    out = torch.empty(1, outputs, dtype=torch.bfloat16, device=x.device)
    wide = triton.next_power_of_2(columns)
    together = min(GROUP, max(1, BYTES // wide))
    _linear_row[(triton.cdiv(outputs, together),)](
        x, x if scales is None else scales, weight.codes, weight.scales, out, outputs, columns,
        outputs // weight.groups, together, wide, scales is not None, GROUP,
        num_warps=8 if wide > 4096 else 4, num_stages=1, **AHEAD,
    )  # fmt: skip
    return out
