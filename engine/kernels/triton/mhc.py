"""Manifold-constrained hyper-connections: into a sub-block, out of it, and from one to the next.

Source: DeepSeek-V4's reference formulas, which `TorchOps.mhc_pre` and `mhc_post` state.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import AMAX_FLOOR, GROUP
from engine.kernels.triton.launch import ahead, await_previous
from engine.kernels.triton.linear import multiprocessors
from engine.kernels.triton.mhc_enter import BOTH, COLLAPSE, GATE, _enter
from engine.kernels.triton.mhc_mix import MixShape, Result, left, mix, mix_shape, way
from engine.kernels.triton.norm import codable, empty_rows
from engine.model.coded_rows import Rows
from engine.model.weights import MhcWeights

STREAMS = 4
GATED_ROWS, PARTS, TOGETHER_ROWS = 16, 64, 64
"""Rows of a program of Sinkhorn's, and parts of sums that it reads: of few rows many, of many rows few; and
rows up to which such programs are launched with others."""


@triton.jit
def _post(y, x, post, comb, out, hidden, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    held = channel < hidden
    await_previous()
    own = tl.load(y + row[:, None] * hidden + channel, mask=held, other=0.0)
    at = row[:, None] * 4 * hidden + channel
    s0 = tl.load(x + at, mask=held, other=0.0)
    s1 = tl.load(x + at + hidden, mask=held, other=0.0)
    s2 = tl.load(x + at + 2 * hidden, mask=held, other=0.0)
    s3 = tl.load(x + at + 3 * hidden, mask=held, other=0.0)
    for k in tl.static_range(4):
        p, c0, c1, c2, c3 = way(post, comb, row, k)
        value = left(own, s0, s1, s2, s3, p, c0, c1, c2, c3, out.dtype.element_ty)
        tl.store(out + at + k * hidden, value, mask=held)


def mhc_pre(
    streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float,
    shape: MixShape | None = None,
) -> tuple[Rows, Tensor, Tensor]:  # fmt: skip
    """Mixing weights of a sub-block and its normalised input, of few rows in two kernels.

    streams  [T, 4, H] bfloat16 or float32, contiguous
    mhc      fn [24, 4 H], base and scale [24], norm [H], float32
    shape    how the products are cut; None: by the number of rows
    returns  (RMSNorm of the collapsed input [T, H] in streams' type, post [T, 4], comb [T, 4, 4] float32);
             of bfloat16 in whole groups of 128 channels the input comes with its codes
    raises   ShapeMismatch
    """
    _check(streams, mhc)
    apart = shape is None and len(streams) > TOGETHER_ROWS
    return _entered(*mix(streams, mhc.fn, shape=shape), mhc, iterations, hc_eps, eps, apart=apart)


def mhc_next(
    result: Result, streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float,
    shape: MixShape | None = None,
) -> tuple[Tensor, Rows, Tensor, Tensor]:  # fmt: skip
    """`mhc_post` of a sub-block's result, then `mhc_pre` of the next one; of few rows in two kernels.

    streams  [T, 4, H] bfloat16 or float32, contiguous; mhc of the next sub-block
    returns  the streams between them, and what `mhc_pre` returns
    raises   ShapeMismatch
    """
    _check(streams, mhc)
    _check_result(result, streams)
    rows, _, hidden = streams.shape
    cut = shape or mix_shape(rows, hidden, multiprocessors(streams.device))
    if cut.rows > 1:
        streams = mhc_post(result.y, streams, result.post, result.comb)
        return streams, *mhc_pre(streams, mhc, iterations, hc_eps, eps, shape)
    streams, mixed, squares = mix(streams, mhc.fn, result, cut)
    return streams, *_entered(streams, mixed, squares, mhc, iterations, hc_eps, eps, apart=False)


def _entered(
    streams: Tensor, mixed: Tensor, squares: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float,
    eps: float, *, apart: bool,
) -> tuple[Rows, Tensor, Tensor]:  # fmt: skip
    """What `mhc_pre` returns, from what `mix` does. apart: Sinkhorn's rounds have a launch of their own"""
    (rows, _, hidden), device = streams.shape, streams.device
    x = torch.empty(rows, hidden, dtype=streams.dtype, device=device)
    post, comb = torch.empty(rows, 4, device=device), torch.empty(rows, 4, 4, device=device)
    out = empty_rows(x) if codable(x) else None
    x, codes, scales = (x, x, x) if out is None else (out.values, out.codes, out.scales)
    split, wide = len(mixed), max(triton.next_power_of_2(hidden), GROUP)

    def launch(programs: int, block: int, kind: int, warps: int) -> None:
        _enter[(programs,)](
            streams, mixed, squares, mhc.scale, mhc.base, mhc.norm, x, codes, scales, post, comb, rows,
            hidden, eps, hc_eps, iterations, split, block, wide, out is not None, GROUP, AMAX_FLOOR, kind,
            num_warps=warps, **ahead(rows),
        )  # fmt: skip

    if rows and apart:
        launch(rows, 1, GATE.value, 1)
        launch(rows, 1, COLLAPSE.value, 8)
    elif rows:
        block = min(GATED_ROWS, max(1, PARTS // split))
        launch(rows + triton.cdiv(rows, block), block, BOTH.value, 4)
    return x if out is None else out, post, comb


def mhc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[k] y + sum over j of comb[j, k] streams[j]; [T, 4, H] in streams' type.

    y        [T, H]; streams [T, 4, H]; post [T, 4], comb [T, 4, 4] float32; all contiguous
    raises   ShapeMismatch
    """
    _check_result(Result(y, post, comb), streams)
    rows, _, hidden = streams.shape
    out = torch.empty_like(streams)
    if rows:
        wide = min(1024, triton.next_power_of_2(hidden))
        _post[(rows, triton.cdiv(hidden, wide))](y, streams, post, comb, out, hidden, wide, **ahead(rows))
    return out


def _check(streams: Tensor, mhc: MhcWeights) -> None:
    _, hc, hidden = streams.shape
    if hc != STREAMS or not streams.is_contiguous() or tuple(mhc.fn.shape) != (24, 4 * hidden):
        raise ShapeMismatch(f"streams {tuple(streams.shape)}, fn {tuple(mhc.fn.shape)}; the kernel takes 4")


def _check_result(result: Result, streams: Tensor) -> None:
    (rows, hc, hidden), y = streams.shape, result.y
    whole = y.is_contiguous() and streams.is_contiguous()
    if hc != STREAMS or tuple(y.shape) != (rows, hidden) or not whole:
        raise ShapeMismatch(f"y {tuple(y.shape)}, streams {tuple(streams.shape)}; the kernel takes 4")
