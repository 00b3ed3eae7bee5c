"""Experts in packed FP4: two grouped products over blocks of one expert's rows.

Weights are decoded to bfloat16 in registers, exactly; activations are rounded to FP8 and kept as bfloat16,
which is exact too, so that products are those of FP8 activations with FP4 weights, summed in float32.
Weights fill the matrix unit's long side, rows its short one. Source: DeepSeek-V4's experts (clamp before
silu; the routing weight before the second product, whose input is rounded after it).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.combine import combine
from engine.kernels.triton.formats import (
    AMAX_FLOOR,
    FP4_GROUP,
    GROUP,
    convert,
    decode_e2m1,
    group_exponent,
    power_of_two,
    product,
    sigmoid,
    to_e4m3,
)
from engine.kernels.triton.quantise import round_split
from engine.kernels.triton.routing import Blocks, sort_choices
from engine.model.quantised import Fp4Experts


@dataclass(frozen=True)
class Cut:
    """How one product is cut: channels a step, outputs of a program, warps, stages of the pipeline."""

    channels: int
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
def _add(total, code, scale, x0, x1, x2, x3, SCALE_GROUP: tl.constexpr):
    """total [N, R] and the product of a tile of weights with rows x, whose channels lie in four parts."""
    v0, v1, v2, v3 = decode_e2m1(code, scale, SCALE_GROUP)
    total = product(v0, x0, total)
    total = product(v1, x1, total)
    total = product(v2, x2, total)
    return product(v3, x3, total)


@triton.jit
def _gate_up(
    x, w, scales, weights, slots, owners, act, hidden, words, groups, inner, limit, CHOICES: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, SCALE_GROUP: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(slots + block * ROWS + tl.arange(0, ROWS))
    live = choice >= 0
    # A block's first slot is always taken: the empty ones compute the same row again, and store nothing.
    choice = tl.where(live, choice, tl.load(slots + block * ROWS))
    row = (choice // CHOICES).to(tl.int64)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, STEP // 4)
    line = expert * 2 * inner + n[:, None]
    w_at = w + line * words + k[None, :]
    s_at = scales + line * groups + tl.arange(0, STEP // SCALE_GROUP)[None, :]
    x_at = x + row[:, None] * hidden + k[None, :]
    gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in range(hidden // STEP):
        at, s_step = step * (STEP // 4), step * (STEP // SCALE_GROUP)
        x0 = tl.trans(tl.load(x_at + at))
        x1 = tl.trans(tl.load(x_at + words + at))
        x2 = tl.trans(tl.load(x_at + 2 * words + at))
        x3 = tl.trans(tl.load(x_at + 3 * words + at))
        code, scale = tl.load(w_at + at), tl.load(s_at + s_step)
        gate = _add(gate, code, scale, x0, x1, x2, x3, SCALE_GROUP)
        code, scale = tl.load(w_at + inner * words + at), tl.load(s_at + inner * groups + s_step)
        up = _add(up, code, scale, x0, x1, x2, x3, SCALE_GROUP)
    gate = tl.minimum(gate * 4294967296.0, limit)
    up = tl.minimum(tl.maximum(up * 4294967296.0, -limit), limit)
    weight = tl.load(weights + choice)
    value = gate * sigmoid(gate) * up * weight[None, :]
    # One program holds 128 outputs of its rows: a whole group of the next product's input.
    value = convert(value, tl.bfloat16).to(tl.float32)
    exponent = group_exponent(tl.maximum(tl.max(tl.abs(value), 0), FLOOR))[None, :]
    near = to_e4m3(value, exponent).to(tl.float32) * power_of_two(exponent)
    place = n // 4 + (n % 4) * (inner // 4)
    at = choice.to(tl.int64)[None, :] * inner + place[:, None]
    tl.store(act + at, near.to(tl.bfloat16), mask=live[None, :])


@triton.jit
def _down(
    act, w, scales, slots, owners, out, hidden, inner, words, groups,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(slots + block * ROWS + tl.arange(0, ROWS))
    live = choice >= 0
    row = tl.where(live, choice, tl.load(slots + block * ROWS)).to(tl.int64)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, STEP // 4)
    line = expert * hidden + n[:, None]
    w_at = w + line * words + k[None, :]
    s_at = scales + line * groups + tl.arange(0, STEP // SCALE_GROUP)[None, :]
    x_at = act + row[:, None] * inner + k[None, :]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in range(inner // STEP):
        at = step * (STEP // 4)
        x0 = tl.trans(tl.load(x_at + at))
        x1 = tl.trans(tl.load(x_at + words + at))
        x2 = tl.trans(tl.load(x_at + 2 * words + at))
        x3 = tl.trans(tl.load(x_at + 3 * words + at))
        code, scale = tl.load(w_at + at), tl.load(s_at + step * (STEP // SCALE_GROUP))
        total = _add(total, code, scale, x0, x1, x2, x3, SCALE_GROUP)
    value = convert(tl.trans(total * 4294967296.0), tl.bfloat16)
    tl.store(out + row[:, None] * hidden + n[None, :], value, mask=live[:, None])


def shape_for(choices: int, experts: Fp4Experts) -> ExpertShape:
    """A cut for so many choices: short blocks where experts have few rows on average. Measured on an H200."""
    few = choices <= 16 * experts.count
    warps = 4 if few else 8
    cuts = [Cut(256 if size % 256 == 0 else GROUP, 128, warps, 3) for size in (experts.hidden, experts.inner)]
    return ExpertShape(16 if few else 32, *cuts)


def gate_up(
    x: Tensor, weights: Tensor, experts: Fp4Experts, blocks: Blocks, limit: float, cut: Cut
) -> Tensor:
    """Each choice's weighted activation, rounded to FP8, in the order of `round_split`; bfloat16 [T k, I].

    x        bfloat16 [T, H], as `round_split` gives it
    weights  float32 [T, k]
    limit    gates are at most this, ups within it
    Rows of ids outside 0..E - 1 aren't written.
    """
    if cut.outputs != GROUP or experts.hidden % cut.channels:
        raise ShapeMismatch(f"{cut} for {experts.hidden} channels: rounding takes groups of {GROUP}")
    choices = weights.numel()
    act = torch.empty(choices, experts.inner, dtype=torch.bfloat16, device=x.device)
    if choices:
        hidden, inner = experts.hidden, experts.inner
        _gate_up[(blocks.owners.shape[0], inner // cut.outputs)](
            x, experts.w13.view(torch.int16), experts.s13, weights, blocks.slots, blocks.owners, act,
            hidden, hidden // 4, hidden // FP4_GROUP, inner, limit, weights.shape[1],
            blocks.rows, cut.outputs, cut.channels, FP4_GROUP, AMAX_FLOOR,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return act


def down(act: Tensor, experts: Fp4Experts, blocks: Blocks, cut: Cut, out: Tensor | None = None) -> Tensor:
    """What each choice's expert gives; bfloat16 [T k, H]. Rows of ids outside 0..E - 1 aren't written.

    out  where it goes; None: new memory, with anything in such rows
    """
    if experts.inner % cut.channels or experts.hidden % cut.outputs:
        raise ShapeMismatch(f"{cut} for {experts.inner} channels and {experts.hidden} outputs")
    if out is None:
        out = torch.empty(act.shape[0], experts.hidden, dtype=torch.bfloat16, device=act.device)
    if act.shape[0]:
        hidden, inner = experts.hidden, experts.inner
        _down[(blocks.owners.shape[0], hidden // cut.outputs)](
            act, experts.w2.view(torch.int16), experts.s2, blocks.slots, blocks.owners, out,
            hidden, inner, inner // 4, inner // FP4_GROUP,
            blocks.rows, cut.outputs, cut.channels, FP4_GROUP,
            num_warps=cut.warps, num_stages=cut.stages,
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
    out = torch.zeros(ids.numel(), experts.hidden, dtype=torch.bfloat16, device=x.device)
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
    act = gate_up(round_split(x), weights, experts, blocks, limit, shape.gate_up)
    return down(act, experts, blocks, shape.down, out)
