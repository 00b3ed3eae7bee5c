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
from engine.kernels.triton.launch import ahead
from engine.kernels.triton.mhc import STREAMS
from engine.kernels.triton.mhc_enter import collapsed
from engine.kernels.triton.mhc_mix import MixShape, mix
from engine.model.weights import HeadWeights


@triton.jit
def _collapse(
    x, mixed, squares, scale, base, norm, out, rows, hidden, eps, hc_eps,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    u = collapsed(
        x, mixed, squares, scale, base, norm, rows, hidden, eps, hc_eps, row, SPLIT, WIDE, NORMED, 0
    )
    channel = tl.arange(0, WIDE)
    tl.store(out + row * hidden + channel, u, mask=channel < hidden)


def collapse(
    streams: Tensor, head: HeadWeights, hc_eps: float, eps: float, *, normed: bool,
    shape: MixShape | None = None,
) -> Tensor:  # fmt: skip
    """streams [R, 4, H], contiguous, collapsed to one; [R, H] in streams' type.

    normed  RMSNorm with head.norm follows
    shape   how the products are cut; None: by the number of rows
    raises  ShapeMismatch
    """
    rows, hc, hidden = streams.shape
    if hc != STREAMS or not streams.is_contiguous() or tuple(head.fn.shape) != (4, 4 * hidden):
        raise ShapeMismatch(f"streams {tuple(streams.shape)}, fn {tuple(head.fn.shape)}; the kernel takes 4")
    out = torch.empty(rows, hidden, dtype=streams.dtype, device=streams.device)
    if rows == 0:
        return out
    _, mixed, squares = mix(streams, head.fn, shape=shape)
    wide = triton.next_power_of_2(hidden)
    _collapse[(rows,)](
        streams, mixed, squares, head.scale, head.base, head.norm, out, rows, hidden, eps, hc_eps, len(mixed),
        wide, normed, num_warps=4, **ahead(rows),
    )  # fmt: skip
    return out
