"""The collapse of streams before the vocabulary's head, with or without the norm that follows it.

Source: DeepSeek-V4's reference formulas, which `TorchOps.collapse` states.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import sigmoid
from engine.kernels.triton.mhc import STREAMS, _collapse, mix
from engine.model.weights import HeadWeights


@triton.jit
def _weights(mixed, squares, scale, base, pre, rows, hidden, eps, hc_eps, SPLIT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, 4)
    at = tl.arange(0, SPLIT).to(tl.int64) * rows + row
    turn = tl.rsqrt(tl.sum(tl.load(squares + at), 0) / (4 * hidden) + eps)
    value = tl.sum(tl.load(mixed + at[:, None] * 32 + stream[None, :]), 0) * turn
    value = sigmoid(value * tl.load(scale) + tl.load(base + stream)) + hc_eps
    tl.store(pre + row * 4 + stream, value)


def collapse(streams: Tensor, head: HeadWeights, hc_eps: float, eps: float, *, normed: bool) -> Tensor:
    """streams [R, 4, H], contiguous, collapsed to one; [R, H] in streams' type.

    normed  RMSNorm with head.norm follows
    raises  ShapeMismatch
    """
    rows, hc, hidden = streams.shape
    if hc != STREAMS or not streams.is_contiguous() or tuple(head.fn.shape) != (4, 4 * hidden):
        raise ShapeMismatch(f"streams {tuple(streams.shape)}, fn {tuple(head.fn.shape)}; the kernel takes 4")
    out = torch.empty(rows, hidden, dtype=streams.dtype, device=streams.device)
    if rows == 0:
        return out
    mixed, squares = mix(streams, head.fn)
    pre = torch.empty(rows, 4, device=streams.device)
    _weights[(rows,)](
        mixed, squares, head.scale, head.base, pre, rows, hidden, eps, hc_eps, len(mixed), num_warps=1
    )
    wide = triton.next_power_of_2(hidden)
    _collapse[(rows,)](streams, pre, head.norm, out, hidden, eps, wide, normed, num_warps=8)
    return out
