"""Activations to FP8: one power-of-two scale for 128 channels of a row.

Source: DeepSeek-V4's quantised matrix products (scale 2^ceil(log2(max(amax, 1e-4) / 448)), e4m3).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import (
    AMAX_FLOOR,
    GROUP,
    convert,
    group_exponent,
    power_of_two,
    sigmoid,
    to_e4m3,
)
from engine.kernels.triton.launch import AHEAD, ahead, await_previous

ROW_GROUPS = 8
WORD_GROUPS = 8


@triton.jit
def _quantise(
    x, codes, scales, columns, x_stride, FLOOR: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    channel = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    held = channel < columns
    await_previous()
    value = tl.load(x + row * x_stride + channel, mask=held, other=0.0).to(tl.float32)
    exponent = group_exponent(tl.maximum(tl.max(tl.abs(value), 1), FLOOR))
    tl.store(codes + row * columns + channel, to_e4m3(value, exponent[:, None]), mask=held)
    groups = columns // SIZE
    tl.store(scales + row * groups + group, power_of_two(exponent), mask=group < groups)


@triton.jit
def code_words(value, FLOOR: tl.constexpr):
    """e4m3 bits of groups [N, 128] in the order of `quantise_words`, and exponents [N] of their scales."""
    n: tl.constexpr = value.shape[0]
    exponent = group_exponent(tl.maximum(tl.max(tl.abs(value), 1), FLOOR))
    code = to_e4m3(value, exponent[:, None]).to(tl.uint8, bitcast=True)
    # Channel 32 q + 8 t + 4 h + i goes to 64 h + 16 t + 4 q + i.
    code = tl.permute(tl.reshape(code, (n, 4, 4, 2, 4)), (0, 3, 2, 1, 4))
    return tl.reshape(code, (n, 128)), exponent


@triton.jit
def _quantise_words(x, codes, scales, groups, x_stride, total, FLOOR: tl.constexpr, GROUPS: tl.constexpr):
    flat = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    held = flat < total
    channel = tl.arange(0, 128)[None, :]
    at = (flat // groups) * x_stride + flat % groups * 128
    await_previous()
    value = tl.load(x + at[:, None] + channel, mask=held[:, None], other=0.0).to(tl.float32)
    code, exponent = code_words(value, FLOOR)
    tl.store(codes + flat[:, None] * 128 + channel, code, mask=held[:, None])
    tl.store(scales + flat, power_of_two(exponent), mask=held)


@triton.jit
def _swiglu(
    x, codes, scales, inner, limit, FLOOR: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    channel = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    held = channel < inner
    at = x + row * 2 * inner + channel
    await_previous()
    gate = tl.minimum(tl.load(at, mask=held, other=0.0).to(tl.float32), limit)
    up = tl.load(at + inner, mask=held, other=0.0).to(tl.float32)
    value = gate * sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)
    value = convert(value, tl.bfloat16).to(tl.float32)
    exponent = group_exponent(tl.maximum(tl.max(tl.abs(value), 1), FLOOR))
    tl.store(codes + row * inner + channel, to_e4m3(value, exponent[:, None]), mask=held)
    groups = inner // SIZE
    tl.store(scales + row * groups + group, power_of_two(exponent), mask=group < groups)


def swiglu(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """FP8 codes and scales, as of `quantise`, of silu of the clamped gate times the clamped up.

    gate_up  [T, 2 I], contiguous, I a multiple of 128; the product is rounded to bfloat16 first
    raises   ShapeMismatch
    """
    rows, columns = _checked(gate_up)
    inner = columns // 2
    if inner % GROUP or not gate_up.is_contiguous():
        raise ShapeMismatch(f"gate_up is {tuple(gate_up.shape)}; takes [T, twice a multiple of {GROUP}]")
    codes = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty(rows, inner // GROUP, dtype=torch.float32, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(inner // GROUP, ROW_GROUPS))
        _swiglu[grid](gate_up, codes, scales, inner, limit, AMAX_FLOOR, ROW_GROUPS, GROUP, **AHEAD)
    return codes, scales


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes and scales of activations.

    x        [T, K] bfloat16 or float32, K a multiple of 128, last dimension contiguous
    returns  float8_e4m3fn [T, K], float32 [T, K / 128], powers of two
    raises   ShapeMismatch
    """
    rows, columns = _checked(x)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.float32, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(columns // GROUP, ROW_GROUPS))
        _quantise[grid](x, codes, scales, columns, x.stride(0), AMAX_FLOOR, ROW_GROUPS, GROUP, **AHEAD)
    return codes, scales


def quantise_words(x: Tensor) -> tuple[Tensor, Tensor]:
    """As quantise, each group's codes in the order of products with experts in FP4: first of every eight
    channels four, then four, of word after word of `expert_layout`.

    raises  ShapeMismatch
    """
    rows, columns = _checked(x)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.float32, device=x.device)
    total = scales.numel()
    if rows:
        _quantise_words[(triton.cdiv(total, WORD_GROUPS),)](
            x, codes.view(torch.uint8), scales, columns // GROUP, x.stride(0), total, AMAX_FLOOR, WORD_GROUPS,
            num_warps=1, **ahead(rows),
        )  # fmt: skip
    return codes, scales


def _checked(x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or x.shape[1] % GROUP or x.stride(1) != 1:
        raise ShapeMismatch(f"x is {tuple(x.shape)}, strides {x.stride()}; takes [T, a multiple of {GROUP}]")
    return x.shape[0], x.shape[1]
