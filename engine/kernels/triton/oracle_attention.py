"""What the attention kernels compute, in plain torch. Slow, and on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton.attend import SeenKeys
from engine.kernels.triton.latent_rows import LATENT_GROUP, V4_ROW, RowLayout
from engine.model.ops import TorchOps
from engine.model.rounding import power_of_two_scale
from engine.model.step import Keys


def pack_rows(x: Tensor, layout: RowLayout) -> Tensor:
    """FP8 rows, uint8 [T, row bytes], of normalised and rotated latents x [T, D]; magnitudes up to 57344."""
    rows = x.shape[0]
    groups = x[:, : layout.nope].float().reshape(rows, layout.groups, LATENT_GROUP)
    scale = power_of_two_scale(groups.abs().amax(2, keepdim=True).clamp_min(1e-4), 448.0)
    out = torch.zeros(rows, layout.row_bytes, dtype=torch.uint8, device=x.device)
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    out[:, : layout.nope] = codes.flatten(1).view(torch.uint8)
    out[:, layout.nope : layout.scales_at] = x[:, layout.nope :].bfloat16().view(torch.uint8)
    exponents = torch.log2(scale).round().to(torch.int32).squeeze(2) + 127
    out[:, layout.scales_at : layout.scales_at + layout.groups] = exponents.to(torch.uint8)
    return out


def unpack_rows(rows: Tensor, layout: RowLayout) -> Tensor:
    """The latents [T, D], bfloat16, of FP8 rows; exact."""
    codes = rows[:, : layout.nope].contiguous().view(torch.float8_e4m3fn).float()
    exponents = rows[:, layout.scales_at : layout.scales_at + layout.groups].int() - 127
    scale = torch.ldexp(torch.ones(exponents.shape, device=rows.device), exponents)
    nope = (codes * scale.repeat_interleave(LATENT_GROUP, 1)).bfloat16()
    rest = rows[:, layout.nope : layout.scales_at].contiguous().view(torch.bfloat16)
    return torch.cat([nope, rest], dim=1)


def attend(
    q: Tensor, window: Keys | SeenKeys, compressed: Keys | SeenKeys | None, sink: Tensor, back: Tensor | None
) -> Tensor:
    """As the kernel, in float32 throughout, by `TorchOps`; [blocks, W, heads, D] float32."""
    blocks, width = q.shape[:2]
    parts = [_dense(keys, blocks, width) for keys in (window, compressed) if keys is not None]
    ops = TorchOps()
    out = ops.attend(q.float(), parts[0], parts[1] if len(parts) > 1 else None, sink)
    if back is not None:
        ops.rotate(out.flatten(0, 1), back)
    return out


def _dense(keys: Keys | SeenKeys, blocks: int, width: int) -> Keys:
    """float32 keys with a bias that says everything: absent rows, ranges and rows outside the pool."""
    coded = keys.pool.dtype == torch.uint8
    pool = unpack_rows(keys.pool, V4_ROW).float() if coded else keys.pool.float()
    rows = keys.rows.long()
    real = (rows > 0) & (rows < len(pool))
    lists, columns = rows.shape
    each = real.view(lists, -1, columns).expand(lists, blocks * width // lists, columns)
    bias = torch.zeros(blocks, width, columns, device=rows.device)
    bias.masked_fill_(~each.reshape(blocks, width, columns), -torch.inf)
    if isinstance(keys, Keys):
        bias += keys.bias
    elif keys.seen is not None:
        first, count = keys.seen.view(blocks, width, 2, 1).unbind(2)
        column = torch.arange(columns, device=rows.device)
        bias.masked_fill_((column < first) | (column >= first + count), -torch.inf)
    return Keys(pool, torch.where(real, rows, 0), bias)
