"""Products of many rows with FP8 weights, by the device's library.

Its block-scaled product wants float32 scales, those of the rows a group of channels after the other. In
bfloat16 it has none with FP8 weights: they are decoded for the call, which many rows make up for.
Source: PyTorch's `scaled_mm` and NVIDIA's cuBLASLt (scales of 1 x 128 and of 128 x 128 values).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.formats import GROUP, decode_e8m0
from engine.kernels.triton.launch import AHEAD, await_previous
from engine.model.quantised import Fp8Weight

ALIGNED = 4
"""Rows come in multiples of it, and a weight's groups of channels too: scales begin at 16 bytes."""
ALIGNED_OUTPUTS = 16
BLOCK_SCALED, SCALED_SINCE = (9, 0), (12, 9)
"""The compute capability whose library has the product under block scales, and the CUDA that it came with."""
SCALE_ROWS, SCALE_COUNT = 64, 2048
DECODED_ROWS = 64


@triton.jit(do_not_specialize=["rows", "padded"])
def _library_scales(
    x_scales, turned, w_scales, wide, rows, padded, groups, s_stride, blocks, wide_groups,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    program, tiles = tl.program_id(0), tl.cdiv(padded, ROWS)
    await_previous()
    if program < tiles:
        t = program * ROWS + tl.arange(0, ROWS)
        g = tl.arange(0, GROUPS)
        held = (g < groups)[None, :]
        source = x_scales + t.to(tl.int64)[:, None] * s_stride + g[None, :]
        scale = tl.load(source, mask=held & (t < rows)[:, None], other=0.0)
        target = turned + g.to(tl.int64)[None, :] * padded + t[:, None]
        tl.store(target, scale, mask=held & (t < padded)[:, None])
    else:
        at = (program - tiles) * COUNT + tl.arange(0, COUNT)
        block, group = at // wide_groups, at % wide_groups
        known = (block < blocks) & (group < groups)
        byte = tl.load(w_scales + block * groups + group, mask=known, other=0)
        tl.store(wide + at, tl.where(known, decode_e8m0(byte), 0.0), mask=block < blocks)


@triton.jit
def _decode_weight(w, w_scales, out, columns, ROWS: tl.constexpr, SIZE: tl.constexpr):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    at = n.to(tl.int64)[:, None] * columns + k[None, :]
    block = tl.program_id(0) * ROWS // SIZE
    factor = decode_e8m0(tl.load(w_scales + block * (columns // SIZE) + tl.program_id(1)))
    value = tl.load(w + at).to(tl.float32) * factor
    await_previous()
    tl.store(out + at, value.to(tl.bfloat16))


def takes(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the library has this product: x [T, groups K] of codes, or bfloat16 for a weight in groups."""
    if x.device.type != "cuda":
        return False
    if x.dtype == torch.bfloat16:
        return weight.shape[0] % GROUP == 0
    if torch.cuda.get_device_capability(x.device) != BLOCK_SCALED or _cuda() < SCALED_SINCE:
        return False
    return weight.groups == 1 and weight.shape[0] % ALIGNED_OUTPUTS == 0


def _cuda() -> tuple[int, ...]:
    """What torch was built with."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def library_coded(codes: Tensor, scales: Tensor, weight: Fp8Weight) -> Tensor:
    """As `linear_coded`, for a weight that the library `takes`; bfloat16 [T, N]."""
    rows, padding = len(codes), -len(codes) % ALIGNED
    if padding:
        bits = F.pad(codes.view(torch.uint8), (0, 0, 0, padding))
        codes = bits.view(torch.float8_e4m3fn)
    turned, wide = library_scales(scales, weight)
    out = F.scaled_mm(
        codes.contiguous(), weight.codes.t(), turned.t(), F.ScalingType.BlockWise1x128, wide.t(),
        F.ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out[:rows]


def library_scales(scales: Tensor, weight: Fp8Weight) -> tuple[Tensor, Tensor]:
    """Scales as the library reads them, the rest of what is padded zero.

    scales   float32 [T, K / 128], last dimension contiguous
    returns  float32 [K / 128, T and up to 3 more]; float32 [ceil(N / 128), K / 128 and up to 3 more]
    """
    (rows, groups), blocks = scales.shape, len(weight.scales)
    padded, wide_groups = rows + -rows % ALIGNED, groups + -groups % ALIGNED
    turned = torch.empty(groups, padded, device=scales.device)
    wide = torch.empty(blocks, wide_groups, device=scales.device)
    grid = (triton.cdiv(padded, SCALE_ROWS) + triton.cdiv(wide.numel(), SCALE_COUNT),)
    _library_scales[grid](
        scales, turned, weight.scales, wide, rows, padded, groups, scales.stride(0), blocks, wide_groups,
        SCALE_ROWS, triton.next_power_of_2(groups), SCALE_COUNT, **AHEAD,
    )  # fmt: skip
    return turned, wide


def library_bf16(x: Tensor, weight: Fp8Weight) -> Tensor:
    """As `linear_bf16`, for a weight that the library `takes`; bfloat16 [T, N]."""
    (outputs, columns), groups = weight.shape, weight.groups
    out = torch.empty(len(x), outputs, dtype=torch.bfloat16, device=x.device)
    wide = decoded(weight).view(groups, outputs // groups, columns)
    parts = x.unflatten(1, (groups, columns)).transpose(0, 1)
    # Each group's outputs are written where they belong in a row.
    torch.bmm(parts, wide.transpose(1, 2), out=out.view(len(x), groups, -1).transpose(0, 1))
    return out


def decoded(weight: Fp8Weight) -> Tensor:
    """The matrix [N, K] in bfloat16, exactly; N a multiple of 128."""
    outputs, columns = weight.shape
    out = torch.empty(outputs, columns, dtype=torch.bfloat16, device=weight.codes.device)
    grid = (outputs // DECODED_ROWS, columns // GROUP)
    _decode_weight[grid](weight.codes, weight.scales, out, columns, DECODED_ROWS, GROUP, **AHEAD)
    return out
