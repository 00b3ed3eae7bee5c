"""Kernels of the experts in packed FP4: see experts.py."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.formats import (
    INTERPRETED,
    convert,
    decode_words,
    largest_scale,
    power_of_two,
    product,
    sigmoid,
)
from engine.kernels.triton.launch import await_previous
from engine.kernels.triton.quantise import code_words


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
def _sort_scales(
    scales, out, slots, owners, blocks, CHOICES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    if tl.load(owners + block) < 0:
        return
    choice = tl.load(slots + block * ROWS + tl.arange(0, ROWS))
    choice = tl.where(choice >= 0, choice, tl.load(slots + block * ROWS))
    group = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    held = (group < blocks)[None, :]
    value = tl.load(scales + (choice // CHOICES * blocks)[:, None] + group[None, :], mask=held)
    at = (block * blocks + group)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(out + at, value, mask=held)


@triton.jit
def _choices(slots, block, ROWS: tl.constexpr):
    """The choices [ROWS] int64 of a block's slots, and which are there.

    A block's first slot is always taken: the empty ones compute the same row again, and store nothing.
    """
    choice = tl.load(slots + block * ROWS + tl.arange(0, ROWS))
    live = choice >= 0
    return tl.where(live, choice, tl.load(slots + block * ROWS)).to(tl.int64), live


@triton.jit
def _gate_up(
    x, x_scales, w, scales, words, weights, slots, owners, act, act_scales, blocks, inner, limit,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, SORTED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    await_previous()
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    choice, live = _choices(slots, block, ROWS)
    row = choice // CHOICES * blocks
    k = tl.arange(0, 128)
    n = tl.arange(0, 2 * OUTPUTS)
    line = expert * blocks * 2 * inner + tl.program_id(0) * OUTPUTS + n % OUTPUTS + n // OUTPUTS * inner
    w_at = w + line[:, None] * 64 + tl.arange(0, 64)[None, :]
    s_at = scales + line[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = x + row[:, None] * 128 + k[None, :]
    x_scale_at = x_scales + (block * blocks * ROWS + tl.arange(0, ROWS) if SORTED else row)
    total = tl.zeros((2 * OUTPUTS, ROWS), tl.float32)
    for step in tl.range(blocks, num_stages=STAGES):
        first = step * 2 * inner
        code, scale = tl.load(w_at + first * 64), tl.load(s_at + first * 4)
        value = tl.load(x_at + step * 128)
        x_scale = tl.load(x_scale_at + step * (ROWS if SORTED else 1))
        total = _add(total, code, scale, words + line + first, value, x_scale, EVEN)
    total = tl.reshape(_scaled(total, words + line, EVEN), (2, OUTPUTS, ROWS))
    gate, up = tl.split(tl.permute(total, (1, 2, 0)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(weights + choice)
    value = gate * sigmoid(gate) * up * weight[None, :]
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = choice[:, None] * inner + n[None, :]
    value = convert(tl.trans(value), tl.bfloat16)
    if act.dtype.element_ty == tl.bfloat16:
        tl.store(act + at, value, mask=live[:, None])
    else:
        # One program holds 128 outputs of its rows: a whole group of the next product's input.
        code, exponent = code_words(value.to(tl.float32), FLOOR)
        tl.store(act + at, code, mask=live[:, None])
        at = (block * (inner // OUTPUTS) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        tl.store(act_scales + at, power_of_two(exponent))


@triton.jit
def _code(
    act, codes, scales, slots, owners, inner, ROWS: tl.constexpr, GROUP: tl.constexpr, FLOOR: tl.constexpr
):
    block = tl.program_id(1)
    await_previous()
    if tl.load(owners + block) < 0:
        return
    choice = tl.load(slots + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = choice >= 0
    at = choice[:, None] * inner + (tl.program_id(0) * GROUP + tl.arange(0, GROUP))[None, :]
    value = tl.load(act + at, mask=live[:, None], other=0.0).to(tl.float32)
    code, exponent = code_words(value, FLOOR)
    tl.store(codes + at, code, mask=live[:, None])
    at = (block * (inner // GROUP) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    tl.store(scales + at, power_of_two(exponent))


@triton.jit(do_not_specialize=["share"])
def _down(
    act, act_scales, w, scales, words, slots, owners, out, blocks, hidden, home_at, share,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, HOME: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    await_previous()
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    choice, live = _choices(slots, block, ROWS)
    row = choice * blocks
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, 128)
    line = expert * blocks * hidden + n
    w_at = w + line[:, None] * 64 + tl.arange(0, 64)[None, :]
    s_at = scales + line[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = act + row[:, None] * 128 + k[None, :]
    x_scale_at = act_scales + block * blocks * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in tl.range(blocks, num_stages=STAGES):
        first = step * hidden
        code, scale = tl.load(w_at + first * 64), tl.load(s_at + first * 4)
        value, x_scale = tl.load(x_at + step * 128), tl.load(x_scale_at + step * ROWS)
        total = _add(total, code, scale, words + line + first, value, x_scale, EVEN)
    value = convert(tl.trans(_scaled(total, words + line, EVEN)), tl.bfloat16)
    if HOME:
        # `out` has the address of each rank's memory, which takes the rows of its own choices.
        rank = choice // share
        base = tl.load(out + rank) + home_at + (choice - rank * share) * hidden * 2
        at = tl.multiple_of(base.to(tl.pointer_type(tl.bfloat16)), 16)
        tl.store(at[:, None] + n[None, :], value, mask=live[:, None])
    else:
        tl.store(out + choice[:, None] * hidden + n[None, :], value, mask=live[:, None])
