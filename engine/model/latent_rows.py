"""FP8 caches in plain torch: rows of latents, and index keys with their scales.

Values of a latent are those of `Rounding` bit by bit, up to a magnitude of 57344: what is larger saturates
there. An RMS-normalised latent of 512 channels can't reach it with weights below 2534.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.rounding import Rounding, index_codes, power_of_two_scale
from engine.model.row_layout import LATENT_GROUP, MAX_EXPONENT, RowLayout, layout_of


def pack_rows(x: Tensor, layout: RowLayout) -> Tensor:
    """FP8 rows, uint8 [T, row bytes], of normalised and rotated latents x [T, D]."""
    rows = x.shape[0]
    groups = x[:, : layout.nope].float().reshape(rows, layout.groups, LATENT_GROUP)
    scale = power_of_two_scale(groups.abs().amax(2, keepdim=True).clamp_min(1e-4), 448.0)
    scale = scale.clamp_max(2.0**MAX_EXPONENT)
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


def read_latents(pool: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Rows [n] int64 of a pool of latents, [n, D] in the type of `like` [..., D]; pool FP8 rows or values."""
    own = pool.index_select(0, rows)
    if pool.dtype == torch.uint8:
        own = unpack_rows(own, layout_of(like.shape[-1], pool.shape[1]))
    return own.to(like.dtype)


def write_latents(pool: Tensor, places: Tensor, latents: Tensor, rounding: Rounding) -> None:
    """Stores latents [n, D], normalised and rotated, in rows `places` [n] int64 of a pool.

    FP8 rows always round; a pool of values takes them as `rounding` gives them back.
    """
    if pool.dtype == torch.uint8:
        own = pack_rows(latents, layout_of(latents.shape[1], pool.shape[1]))
    else:
        own = rounding.latent(latents)
    pool.index_copy_(0, places, own)


def read_keys(pool: Tensor, scales: Tensor | None, rows: Tensor) -> Tensor:
    """Rows [n] int64 of a pool of index keys, [n, Di]: in the pool's type, or float32 where it holds codes.

    scales  float32 [P] of codes; None: the pool holds values
    """
    if scales is None:
        return pool.index_select(0, rows)
    # Bytes: not every operation takes codes as numbers.
    codes = pool.view(torch.uint8).index_select(0, rows).view(pool.dtype)
    return codes.float() * scales.index_select(0, rows).unsqueeze(1)


def write_keys(pool: Tensor, scales: Tensor | None, places: Tensor, keys: Tensor, rounding: Rounding) -> None:
    """Stores rotated index keys [n, Di] in rows `places` [n] int64; scales as of `read_keys`."""
    if scales is None:
        pool.index_copy_(0, places, rounding.index(keys))
        return
    codes, factor = index_codes(keys)
    pool.view(torch.uint8).index_copy_(0, places, codes.view(torch.uint8))
    scales.index_copy_(0, places, factor)
