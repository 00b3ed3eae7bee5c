"""Products of one row: no matrix unit, as there is nothing to share a weight among.

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

BYTES = 32768
"""Of a program's weights: programs take time to come and go. Measured on an H200: whole layers take 181 us,
with half of it 186, with twice as much 193; several blocks a program gained nothing."""
LOADED = tl.constexpr(16)
"""Weights that a thread loads at once: as many products are added up before their scale comes in."""


@triton.jit
def _weights(w, n, k, outputs, columns, WHOLE: tl.constexpr):
    """Rows n [N] at channels k [K], which nobody reads again in the step. WHOLE: none lie outside."""
    at = w + n.to(tl.int64)[:, None] * columns + k[None, :]
    if WHOLE:
        value = tl.load(at, eviction_policy="evict_first")
    else:
        inside = (k < columns)[None, :] & (n < outputs)[:, None]
        value = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return value


@triton.jit
def _linear_row(
    x, x_scales, w, w_scales, out, outputs, columns, rank, OUTPUTS: tl.constexpr, WIDE: tl.constexpr,
    CODED: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OUTPUTS
    group = first // rank
    n = first + tl.arange(0, OUTPUTS)
    k = tl.arange(0, WIDE)
    weight = _weights(w, n, k, outputs, columns, WHOLE)
    part = tl.arange(0, WIDE // LOADED) * LOADED
    # A program's outputs lie in one square of scales.
    square = w_scales + first // SIZE * (columns // SIZE) + part // SIZE
    factor = decode_e8m0(tl.load(square, mask=part < columns, other=0))
    await_previous()
    value = tl.load(x + group * columns + k, mask=k < columns, other=0.0).to(tl.float32)
    if CODED:
        scale_at = x_scales + group * (columns // SIZE) + part // SIZE
        factor = factor * tl.load(scale_at, mask=part < columns, other=0.0)
    products = tl.reshape(weight.to(tl.float32) * value[None, :], (OUTPUTS, WIDE // LOADED, LOADED))
    total = tl.sum(tl.sum(products, 2) * factor[None, :], 1)
    tl.store(out + n, convert(total, out.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize_on_alignment=["at"])
def _project_row(
    x, w, biases, at, out, outputs, columns, OUTPUTS: tl.constexpr, WIDE: tl.constexpr,
    BIASED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, WIDE)
    weight = _weights(w, n, k, outputs, columns, WHOLE)
    await_previous()
    value = tl.load(x + k, mask=k < columns, other=0.0).to(tl.float32)
    total = tl.sum(weight.to(tl.float32) * value[None, :], 1)
    if BIASED:
        bias = biases + tl.load(at).to(tl.int64) * outputs + n
        total += tl.load(bias, mask=n < outputs, other=0.0)
    tl.store(out + n, total, mask=n < outputs)


def one_row(x: Tensor, scales: Tensor | None, weight: Fp8Weight) -> Tensor:
    """As `linear_coded`, or without scales `linear_bf16`, on one row x [1, groups K]; bfloat16 [1, N]."""
    outputs, columns = weight.codes.shape
    out = torch.empty(1, outputs, dtype=torch.bfloat16, device=x.device)
    wide = triton.next_power_of_2(columns)
    together = _together(wide)
    whole = columns == wide and outputs % together == 0
    _linear_row[(triton.cdiv(outputs, together),)](
        x, x if scales is None else scales, weight.codes, weight.scales, out, outputs, columns,
        outputs // weight.groups, together, wide, scales is not None, GROUP, whole,
        num_warps=_warps(wide), num_stages=1, **AHEAD,
    )  # fmt: skip
    return out


def project_row(x: Tensor, weight: Tensor, out: Tensor, bias: tuple[Tensor, Tensor] | None = None) -> None:
    """out [N] float32 = one row x [1, K] times weight [N, K] transposed, both bfloat16.

    bias  biases [n, N] float32 and the number [1] of the one that is added
    """
    outputs, columns = weight.shape
    wide = triton.next_power_of_2(columns)
    together = _together(weight.element_size() * wide)
    whole = columns == wide and outputs % together == 0
    biases, at = bias or (out, out)
    _project_row[(triton.cdiv(outputs, together),)](
        x, weight, biases, at, out, outputs, columns, together, wide, bias is not None, whole,
        num_warps=_warps(wide), num_stages=1, **AHEAD,
    )  # fmt: skip


def _together(size: int) -> int:
    """Outputs of a program, whose weights are `size` bytes each: a power of two, at most a square's."""
    return min(GROUP, max(1, BYTES // size))


def _warps(wide: int) -> int:
    """Of a program, for rows of so many channels."""
    return 8 if wide > 4096 else 4
