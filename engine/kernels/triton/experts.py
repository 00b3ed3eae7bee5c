"""Experts in packed FP4: two grouped products over blocks of one expert's rows.

Weights are decoded to e4m3 in registers, exactly, and multiplied with activations in FP8; what 128 channels
give is summed in float32 with the scales of both. Weights fill the matrix unit's long side, rows its short
one. Source: DeepSeek-V4's experts (clamp before silu; the routing weight before the second product, whose
input is rounded after it).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.combine import clear_outside, combine
from engine.kernels.triton.formats import (
    AMAX_FLOOR,
    GROUP,
    INTERPRETED,
    convert,
    decode_words,
    group_exponent,
    largest_scale,
    power_of_two,
    product,
    sigmoid,
    to_e4m3,
)
from engine.kernels.triton.quantise import quantise_words
from engine.kernels.triton.routing import Blocks, sort_choices
from engine.model.quantised import Fp4Experts

Coded = tuple[Tensor, Tensor]
"""Rows [T, K] as e4m3 codes, and their scales float32 [T, K / 128]."""


@dataclass(frozen=True)
class Cut:
    """How one product is cut: outputs of a program, warps, stages of the pipeline."""

    outputs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ExpertShape:
    """Rows of a block, and both products; gate_up's outputs are 128, a whole group of down's input."""

    rows: int
    gate_up: Cut
    down: Cut


@triton.jit
def _add(total, code, scale, words, x, x_scale, EVEN: tl.constexpr):
    """total [N, R] and the product of 128 channels of weights with rows x [R, 128].

    words  where the weights' scales lie as int32 [N]; not read where they are EVEN: `_scaled` does it
    """
    value, x = decode_words(code, scale), tl.trans(x)
    # One product a step: each is waited for.
    part = product(value, x.to(tl.float32) if INTERPRETED else x, None)
    factor = x_scale[None, :]
    if not EVEN:
        factor = factor * largest_scale(tl.load(words))[:, None]
    return total + part * factor


@triton.jit
def _scaled(total, words, EVEN: tl.constexpr):
    """What `_add` gave, over 2^32 and times the scales of the rows of weights, if that is still to do."""
    factor = 2.3283064365386963e-10
    if EVEN:
        factor = factor * largest_scale(tl.load(words))[:, None]
    return total * factor


@triton.jit
def _gate_up(
    x, x_scales, w, scales, words, weights, slots, owners, act, act_scales, blocks, inner, limit,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(slots + block * ROWS + tl.arange(0, ROWS))
    live = choice >= 0
    # A block's first slot is always taken: the empty ones compute the same row again, and store nothing.
    choice = tl.where(live, choice, tl.load(slots + block * ROWS)).to(tl.int64)
    row = choice // CHOICES * blocks
    k = tl.arange(0, 128)
    n = tl.arange(0, 2 * OUTPUTS)
    line = expert * blocks * 2 * inner + tl.program_id(0) * OUTPUTS + n % OUTPUTS + n // OUTPUTS * inner
    w_at = w + line[:, None] * 64 + tl.arange(0, 64)[None, :]
    s_at = scales + line[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = x + row[:, None] * 128 + k[None, :]
    total = tl.zeros((2 * OUTPUTS, ROWS), tl.float32)
    for step in tl.range(blocks, num_stages=STAGES):
        first = step * 2 * inner
        code, scale = tl.load(w_at + first * 64), tl.load(s_at + first * 4)
        value, x_scale = tl.load(x_at + step * 128), tl.load(x_scales + row + step)
        total = _add(total, code, scale, words + line + first, value, x_scale, EVEN)
    total = tl.reshape(_scaled(total, words + line, EVEN), (2, OUTPUTS, ROWS))
    gate, up = tl.split(tl.permute(total, (1, 2, 0)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(weights + choice)
    value = gate * sigmoid(gate) * up * weight[None, :]
    # One program holds 128 outputs of its rows: a whole group of the next product's input.
    value = convert(value, tl.bfloat16).to(tl.float32)
    exponent = group_exponent(tl.maximum(tl.max(tl.abs(value), 0), FLOOR))
    n = tl.arange(0, OUTPUTS)
    place = tl.program_id(0) * OUTPUTS + n // 4 % 2 * 64 + n // 8 % 4 * 16 + n // 32 * 4 + n % 4
    at = choice[None, :] * inner + place[:, None]
    tl.store(act + at, to_e4m3(value, exponent[None, :]), mask=live[None, :])
    at = choice * (inner // OUTPUTS) + tl.program_id(0)
    tl.store(act_scales + at, power_of_two(exponent), mask=live)


@triton.jit
def _down(
    act, act_scales, w, scales, words, slots, owners, out, blocks, hidden,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(slots + block * ROWS + tl.arange(0, ROWS))
    live = choice >= 0
    choice = tl.where(live, choice, tl.load(slots + block * ROWS)).to(tl.int64)
    row = choice * blocks
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, 128)
    line = expert * blocks * hidden + n
    w_at = w + line[:, None] * 64 + tl.arange(0, 64)[None, :]
    s_at = scales + line[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = act + row[:, None] * 128 + k[None, :]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in tl.range(blocks, num_stages=STAGES):
        first = step * hidden
        code, scale = tl.load(w_at + first * 64), tl.load(s_at + first * 4)
        value, x_scale = tl.load(x_at + step * 128), tl.load(act_scales + row + step)
        total = _add(total, code, scale, words + line + first, value, x_scale, EVEN)
    value = convert(tl.trans(_scaled(total, words + line, EVEN)), tl.bfloat16)
    tl.store(out + choice[:, None] * hidden + n[None, :], value, mask=live[:, None])


def shape_for(choices: int, experts: Fp4Experts) -> ExpertShape:
    """A cut for so many choices, by how many rows experts have on average. Measured on an H200."""
    few = choices <= 16 * experts.count
    if few:
        return ExpertShape(16, Cut(128, 4, 4), Cut(128, 4, 4))
    return ExpertShape(32, Cut(128, 4, 4), Cut(128, 4, 4))


def gate_up(x: Coded, weights: Tensor, experts: Fp4Experts, blocks: Blocks, limit: float, cut: Cut) -> Coded:
    """Each choice's weighted activation in FP8, as of `quantise_words`; [T k, I].

    x        [T, H], as `quantise_words` gives it
    weights  float32 [T, k]
    limit    gates are at most this, ups within it
    raises   ShapeMismatch. Rows of ids outside 0..E - 1 aren't written.
    """
    if cut.outputs != GROUP:
        raise ShapeMismatch(f"{cut}: rounding takes groups of {GROUP}")
    (codes, scales), choices, inner = x, weights.numel(), experts.inner
    act = torch.empty(choices, inner, dtype=torch.float8_e4m3fn, device=codes.device)
    act_scales = torch.empty(choices, inner // GROUP, dtype=torch.float32, device=codes.device)
    if choices:
        _gate_up[(inner // cut.outputs, blocks.owners.shape[0])](
            codes, scales, experts.w13, experts.s13, experts.s13.view(torch.int32), weights, blocks.slots,
            blocks.owners, act, act_scales, experts.hidden // GROUP, inner, limit, weights.shape[1],
            blocks.rows, cut.outputs, cut.stages, experts.even, AMAX_FLOOR, num_warps=cut.warps,
        )  # fmt: skip
    return act, act_scales


def down(act: Coded, experts: Fp4Experts, blocks: Blocks, cut: Cut, out: Tensor | None = None) -> Tensor:
    """What each choice's expert gives; bfloat16 [T k, H]. Rows of ids outside 0..E - 1 aren't written.

    out     where it goes; None: new memory, with anything in such rows
    raises  ShapeMismatch
    """
    if experts.hidden % cut.outputs:
        raise ShapeMismatch(f"{cut} for {experts.hidden} outputs")
    codes, scales = act
    if out is None:
        out = torch.empty(codes.shape[0], experts.hidden, dtype=torch.bfloat16, device=codes.device)
    if codes.shape[0]:
        _down[(experts.hidden // cut.outputs, blocks.owners.shape[0])](
            codes, scales, experts.w2, experts.s2, experts.s2.view(torch.int32), blocks.slots, blocks.owners,
            out, experts.inner // GROUP, experts.hidden, blocks.rows, cut.outputs, cut.stages, experts.even,
            num_warps=cut.warps,
        )  # fmt: skip
    return out


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, extra: Tensor | None = None,
    shape: ExpertShape | None = None, dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """Sum over each row's experts, plus `extra`; [T, H] of `dtype`. Sizes follow from shapes alone.

    x        [T, H] bfloat16 or float32; ids [T, k] int32 or int64, outside 0..E - 1: nothing is added
    weights  [T, k] float32
    raises   ShapeMismatch
    """
    rows = _rows(x, ids, weights, experts, limit, shape, None)
    return combine(rows, ids.contiguous(), experts.count, extra, dtype)


def choice_rows(x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float) -> Tensor:
    """What each choice's expert gives, weighted; bfloat16 [T, k, H], zero for ids outside 0..E - 1.

    Arguments and errors as of `run_experts`.
    """
    out = torch.empty(ids.numel(), experts.hidden, dtype=torch.bfloat16, device=x.device)
    clear_outside(out, ids.contiguous(), experts.count)
    return _rows(x, ids, weights, experts, limit, None, out).view(*ids.shape, experts.hidden)


def _rows(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, shape: ExpertShape | None,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    if x.shape[1] != experts.hidden or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ShapeMismatch(f"x {tuple(x.shape)}, ids {tuple(ids.shape)}, experts of {experts.hidden}")
    ids, weights = ids.contiguous(), weights.contiguous()
    shape = shape or shape_for(ids.numel(), experts)
    blocks = sort_choices(ids, experts.count, shape.rows)
    act = gate_up(quantise_words(x), weights, experts, blocks, limit, shape.gate_up)
    return down(act, experts, blocks, shape.down, out)
