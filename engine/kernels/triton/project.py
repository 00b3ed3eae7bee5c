"""Products with bfloat16 weights, exact in float32, of few rows: in parts that whoever reads them adds up.

Few rows leave a product to the memory's rate: more programs than outputs fill the device, each with some of
the channels. Source: the products of DeepSeek-V4's router and compressors, in float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import product
from engine.kernels.triton.launch import LINE, ahead, await_previous, prefetch
from engine.kernels.triton.linear import multiprocessors
from engine.kernels.triton.one_row import project_row

MOST_ROWS = 64
"""Beyond it a library's product is as good."""
OUTPUTS, CHANNELS = 64, 128
MAX_SPLIT = 8
LINE_VALUES = tl.constexpr(LINE // 2)
"""Weights of a line."""
SUMMED = 1024
"""Values that a program adds up."""


@triton.jit
def _project(
    x, w, parts, rows, outputs, columns, x_stride,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.arange(0, ROWS)
    k = tl.arange(0, WIDE)
    # Lanes beyond the end read row 0 and are never stored.
    n_read = tl.where(n < outputs, n, 0).to(tl.int64)
    t_read = tl.where(t < rows, t, 0).to(tl.int64)
    steps = tl.cdiv(columns, WIDE)
    share = tl.cdiv(steps, SPLIT)
    begin = tl.program_id(1) * share
    line = tl.arange(0, LINES)[None, :]
    ahead = w + n_read[:, None] * columns + begin * WIDE + line * LINE_VALUES
    prefetch(tl.where(begin * WIDE + line * LINE_VALUES < columns, ahead, w))
    await_previous()
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in range(begin, tl.minimum(begin + share, steps)):
        channel = (step * WIDE + k)[None, :]
        held = channel < columns
        weight = tl.load(w + n_read[:, None] * columns + channel, mask=held, other=0.0)
        value = tl.load(x + t_read[:, None] * x_stride + channel, mask=held, other=0.0)
        total = product(weight, tl.trans(value), total)
    at = (tl.program_id(1) * rows + t[None, :]).to(tl.int64) * outputs + n[:, None]
    tl.store(parts + at, total, mask=(t < rows)[None, :] & (n < outputs)[:, None])


@triton.jit(do_not_specialize_on_alignment=["at"])
def _add(
    parts, biases, at, out, rows, columns, PARTS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    held = channel < columns
    await_previous()
    total = tl.load(biases + tl.load(at + row) * columns + channel, mask=held, other=0.0)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * columns + channel, mask=held, other=0.0)
    tl.store(out + row * columns + channel, total, mask=held)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed, both bfloat16; float32 [parts, T, N], to be added up.

    raises  ShapeMismatch
    """
    (rows, columns), outputs = x.shape, len(weight)
    _check(x, weight)
    if rows == 1:
        out = torch.empty(1, 1, outputs, device=x.device)
        project_row(x, weight, out)
        return out
    if rows > MOST_ROWS and x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32).unsqueeze(0)
    block = max(16, triton.next_power_of_2(rows))
    blocks, split = triton.cdiv(outputs, OUTPUTS), 1
    while split < MAX_SPLIT and blocks * split < multiprocessors(x.device):
        split *= 2
    share = triton.cdiv(triton.cdiv(columns, CHANNELS), split)
    parts = torch.empty(split, rows, outputs, device=x.device)
    if rows:
        _project[(blocks, split)](
            x, weight, parts, rows, outputs, columns, x.stride(0), split, block, OUTPUTS, CHANNELS,
            triton.next_power_of_2(CHANNELS // LINE_VALUES.value * share), num_warps=4, num_stages=4,
            **ahead(rows),
        )  # fmt: skip
    return parts


def project_to(x: Tensor, weight: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
    """out [T, N] = x [T, K] times weight [N, K] transposed, plus biases[at]; of one row in one kernel.

    Other arguments as of `project` and `add_parts`.
    raises  ShapeMismatch
    """
    if len(x) != 1:
        add_parts(project(x, weight), biases, at, out)
        return
    _check(x, weight)
    _check_sum((1, len(weight)), biases, at, out)
    project_row(x, weight, out, (biases, at))


def add_parts(parts: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
    """out [T, N] = the sum of parts [P, T, N], plus biases[at]; all float32 and contiguous.

    biases  [n, N], of which each row takes number `at` [T], int64 or int32
    raises  ShapeMismatch
    """
    count, rows, columns = parts.shape
    if not parts.is_contiguous():
        raise ShapeMismatch(f"parts {tuple(parts.shape)}, strides {parts.stride()}")
    _check_sum((rows, columns), biases, at, out)
    if rows:
        wide = min(SUMMED, triton.next_power_of_2(columns))
        _add[(rows, triton.cdiv(columns, wide))](
            parts, biases, at, out, rows, columns, count, wide, **ahead(rows)
        )


def _check(x: Tensor, weight: Tensor) -> None:
    """raises  ShapeMismatch"""
    if (
        x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or x.stride(1) != 1
        or weight.shape[1] != x.shape[1] or not weight.is_contiguous()
    ):  # fmt: skip
        raise ShapeMismatch(f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}")


def _check_sum(shape: tuple[int, int], biases: Tensor, at: Tensor, out: Tensor) -> None:
    """raises  ShapeMismatch where a sum [T, N] doesn't fit the rest"""
    fits = tuple(out.shape) == shape and biases.shape[1] == shape[1] and len(at) == shape[0]
    if not fits or not all(tensor.is_contiguous() for tensor in (biases, at, out)):
        raise ShapeMismatch(f"a sum {shape}, biases {tuple(biases.shape)}, out {tuple(out.shape)}")
