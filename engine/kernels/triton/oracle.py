"""What each kernel computes, in plain torch with the same rounding. Slow, and on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.triton.formats import AMAX_FLOOR, GROUP
from engine.model.expert_layout import stored_matrix
from engine.model.quant import (
    FP8_MAX,
    ceil_log2,
    dequantise_fp8_blocks,
    power_of_two,
)
from engine.model.quantised import Fp4Experts, Fp8Weight


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes [T, K] and float32 scales [T, K / 128] of activations x [T, K]."""
    groups = x.float().reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    exponent = ceil_log2(groups.abs().amax(2).clamp_min(AMAX_FLOOR) / FP8_MAX)
    codes = (groups * power_of_two(-exponent).unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX)
    return codes.flatten(1).to(torch.float8_e4m3fn), power_of_two(exponent)


def rounded(x: Tensor) -> Tensor:
    """x [T, K] as its FP8 codes and scales say; float32."""
    codes, scales = quantise(x)
    return codes.float() * scales.repeat_interleave(GROUP, 1)


def linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x [T, groups K] as it is through FP8 weights, in float32; [T, N]."""
    full = dequantise_fp8_blocks(weight.codes, weight.scales, torch.float32)
    parts = x.float().reshape(x.shape[0], weight.groups, full.shape[1])
    return torch.einsum("tgk,gnk->tgn", parts, full.view(weight.groups, -1, full.shape[1])).flatten(1)


def route(
    logits: Tensor, tokens: Tensor, bias: Tensor | None, table: Tensor | None, count: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As the kernel; logits in float64 for the weights' sake are welcome."""
    scores = torch.sqrt(F.softplus(logits))
    vocabulary = 2**31 - 1 if table is None else table.shape[0]
    known = ((tokens >= 0) & (tokens < vocabulary)).unsqueeze(1)
    if table is not None:
        ids = table[torch.where(known[:, 0], tokens, 0)].long()
    else:
        assert bias is not None
        ids = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :count]
    weights = scores.gather(1, ids)
    weights = weights * (scaling / weights.sum(1, keepdim=True))
    return torch.where(known, ids, -1).int(), torch.where(known, weights, 0.0)


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, extra: Tensor | None = None
) -> Tensor:
    """The sum over choices, in float32 but for the roundings that the kernels make; float32 [T, H]."""
    total = run_choices(x, ids, weights, experts, limit).sum(1)
    return total if extra is None else total + extra.float()


def run_choices(x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float) -> Tensor:
    """What each choice's expert gives, expert by expert; float32 [T, k, H]."""
    out = torch.zeros(*ids.shape, experts.hidden, device=x.device)
    near = rounded(x)
    for expert in range(experts.count):
        row, choice = (ids == expert).nonzero(as_tuple=True)
        if not len(row):
            continue
        w13 = stored_matrix(experts.w13[expert], experts.s13[expert]).values(torch.float32)
        w2 = stored_matrix(experts.w2[expert], experts.s2[expert]).values(torch.float32)
        gate, up = (near[row] @ w13.t()).chunk(2, dim=1)
        act = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weights[row, choice].unsqueeze(1)
        out[row, choice] = (rounded(act.bfloat16()) @ w2.t()).bfloat16().float()
    return out
