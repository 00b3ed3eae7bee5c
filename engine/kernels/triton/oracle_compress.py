"""What the compressor's, indexer's and selection's kernels compute, in plain torch; on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton.compress_entry import IndexPool
from engine.model.compressor import started
from engine.model.latent_rows import unpack_rows
from engine.model.ops import TorchOps
from engine.model.rounding import fp4_rounded, fp8_rounded, hadamard
from engine.model.row_layout import RowLayout
from engine.model.step import C4Entries

OPS = TorchOps()


def close_c4(
    ring: Tensor, pending: Tensor, entries: C4Entries, turns: Tensor, norm: Tensor, index_norm: Tensor,
    eps: float, pool: Tensor, keys: IndexPool, simulated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What stands in the pools' rows of every entry: latents [E, D] and keys [E, Di], as numbers, float32."""
    count, wide = entries.out_rows.shape[0], norm.shape[0]
    both = wide + index_norm.shape[0]
    source = torch.cat([ring.index_select(0, entries.ring_rows), pending])
    items = source.view(-1, 2 * both).index_select(0, entries.halves.flatten()).view(count, 8, 2 * both)
    pooled = OPS.pool_windows(items[..., :both], items[..., both:] + entries.bias.view(count, 8, 1))
    latent = finished(pooled[:, :wide], norm, turns, eps, type_of(pool))
    key = finished(pooled[:, wide:], index_norm, turns, eps, type_of(keys.values))
    return stored_latent(latent, turns, pool, simulated), stored_key(key, keys)


def close_c128(
    states: Tensor, pending: Tensor, slots: Tensor, fresh: Tensor, firsts: Tensor, counts: Tensor,
    turns: Tensor, norm: Tensor, eps: float, pool: Tensor, simulated: bool,
) -> Tensor:  # fmt: skip
    """What stands in the pool's row of every entry: [E, D], as numbers, float32."""
    wide = norm.shape[0]
    pooled = torch.empty(len(slots), wide, device=pending.device)
    for entry, (slot, first, count) in enumerate(zip(slots, firsts, counts, strict=True)):
        state = started(states[slot].unsqueeze(0), fresh[entry : entry + 1])
        rows = pending[first : first + count].unsqueeze(0)
        state = OPS.fold(state, rows, torch.ones(1, rows.shape[1], dtype=torch.bool, device=rows.device))
        pooled[entry] = state[0, 2] / state[0, 1]
    return stored_latent(finished(pooled, norm, turns, eps, type_of(pool)), turns, pool, simulated)


def type_of(pool: Tensor) -> torch.dtype:
    """The type in which an entry is computed on its way to the pool."""
    return pool.dtype if pool.dtype == torch.float32 else torch.bfloat16


def finished(pooled: Tensor, norm: Tensor, turns: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Pooled entries [E, D] normalised and rotated, in `dtype`."""
    entry = OPS.rms_norm(pooled.to(dtype), norm, eps)
    OPS.rotate(entry.unsqueeze(1), turns)
    return entry


def stored_latent(latent: Tensor, turns: Tensor, pool: Tensor, simulated: bool) -> Tensor:
    """Latents [E, D] as the pool gives them back, float32."""
    if len(latent) and (simulated or pool.dtype == torch.uint8):
        nope = latent.shape[1] - 2 * turns.shape[-1]
        latent = torch.cat([fp8_rounded(latent[:, :nope], 64), latent[:, nope:]], 1)
    return latent.float()


def stored_key(key: Tensor, pool: IndexPool) -> Tensor:
    """Index keys [E, Di] as the pool gives them back, float32."""
    if not len(key) or (not pool.rounded and pool.scales is None):
        return key.float()
    key = (key.float() @ hadamard(key.shape[1]).to(key.device)).to(key.dtype)
    if pool.scales is None:
        return fp4_rounded(key, 32).float()
    scale = key.float().abs().amax(1, keepdim=True).clamp_min(1e-4) / 448
    return (key.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def read_latents(pool: Tensor, rows: Tensor, rotary: int) -> Tensor:
    """Rows of the pool as numbers, float32 [E, D]; its last `rotary` channels turn."""
    if pool.dtype != torch.uint8:
        return pool[rows].float()
    nope = next(n for n in range(64, pool.shape[1], 64) if RowLayout(n, rotary).row_bytes == pool.shape[1])
    return unpack_rows(pool[rows], RowLayout(nope, rotary)).float()


def read_keys(pool: IndexPool, rows: Tensor) -> Tensor:
    """Rows of the pool as numbers, float32 [E, Di]."""
    if pool.scales is None:
        return pool.values[rows].float()
    codes = pool.values.view(torch.uint8)[rows].view(pool.values.dtype)
    return codes.float() * pool.scales[rows].unsqueeze(1)


def commit_c128(
    states: Tensor, pending: Tensor, slots: Tensor, starts: Tensor, firsts: Tensor, lens: Tensor
) -> Tensor:
    """States [L, S, 3, D] after the first lens of each request's rows, one row at a time; a new tensor."""
    out = states.clone()
    for slot, start, first, length in zip(
        slots.tolist(), starts.tolist(), firsts.tolist(), lens.tolist(), strict=True
    ):
        for place in range(start, start + length):
            row = pending[:, first + place - start].unsqueeze(1)
            valid = torch.ones(len(row), 1, dtype=torch.bool, device=row.device)
            first_of_window = torch.full((len(row),), place % 128 == 0, device=row.device)
            out[:, slot] = OPS.fold(started(out[:, slot], first_of_window), row, valid)
        if (start + length) % 128 == 0:
            out[:, slot] = started(out[:, slot], torch.ones(len(out), dtype=torch.bool, device=out.device))
    return out


def commit_c4(
    ring: Tensor, pending: Tensor, slots: Tensor, starts: Tensor, firsts: Tensor, lens: Tensor
) -> Tensor:
    """Rings [L, S 8, C] after the first lens of each request's rows; a new tensor."""
    out = ring.clone()
    for slot, start, first, length in zip(
        slots.tolist(), starts.tolist(), firsts.tolist(), lens.tolist(), strict=True
    ):
        for step in range(length):
            out[:, slot * 8 + (start + step) % 8] = pending[:, first + step]
    return out


def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None, rows: Tensor, seen: Tensor
) -> Tensor:
    """Scores [blocks, W, N] float32, minus infinity where unseen or no key."""
    real = (rows > 0) & (rows < len(keys))
    safe = torch.where(real, rows, 0)
    own = keys.float()[safe] * (1.0 if key_scales is None else key_scales[safe].unsqueeze(-1))
    dots = torch.einsum("bwhd,bnd->bwhn", q.float(), own).relu_()
    scores = torch.einsum("bwh,bwhn->bwn", weights, dots)
    if seen.is_floating_point():
        scores = scores + seen
    else:
        scores.masked_fill_(torch.arange(rows.shape[1], device=q.device) >= seen.unsqueeze(-1), -torch.inf)
    return scores.masked_fill(~real.unsqueeze(1), -torch.inf)


def round_queries(q: Tensor, turns: Tensor) -> Tensor:
    """Queries [T, heads, Di] rotated, transformed and rounded to FP4, float32."""
    q = q.clone()
    OPS.rotate(q, turns)
    return stored_key(q.flatten(0, 1), IndexPool(q, rounded=True)).view(q.shape)


def code_queries(q: Tensor, turns: Tensor) -> Tensor:
    """Queries [T, heads, Di] rotated, transformed and through FP8 and back, float32."""
    q = q.clone()
    OPS.rotate(q, turns)
    return stored_key(q.flatten(0, 1), IndexPool(q, scales=q)).view(q.shape)
