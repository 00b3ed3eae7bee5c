"""The compressors of c4 and c128 layers: raw rows of a step, and the entries that close in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.config import C4
from engine.model.ops import TorchOps
from engine.model.step import StepRows
from engine.model.weights import CompressorWeights

if TYPE_CHECKING:
    from engine.model.attention import LayerStep

# The running maximum of an empty online state: finite, so that no difference of maxima is a NaN.
EMPTY_MAX = -1e30


def pend(
    x: Tensor, weights: CompressorWeights, rows: StepRows, pending: Tensor, ratio: int, ops: TorchOps
) -> None:
    """Writes the raw rows (latents, and scores with their position bias) of x [T, H] to pending [T, C]."""
    phase = rows.phase4 if ratio == C4 else rows.phase128
    ops.linear_to(x, weights.side, weights.ape.index_select(0, phase), pending)


def close_c4(weights: CompressorWeights, step: LayerStep) -> None:
    """Writes the c4 and index entries of windows that close in the step to their pools."""
    entries, cache, ops, config = step.rows.c4, step.cache, step.ops, step.config
    if entries is None or step.pending is None:
        return
    assert cache.c4_ring is not None
    assert cache.c4 is not None
    assert cache.index is not None
    assert weights.index_norm is not None
    assert step.turns.c4 is not None
    count, wide = entries.out_rows.shape[0], config.head_dim
    both = wide + config.index_head_dim
    source = torch.cat([cache.c4_ring.index_select(0, entries.ring_rows), step.pending])
    items = source.view(-1, 2 * both).index_select(0, entries.halves.flatten()).view(count, 2 * C4, 2 * both)
    pooled = ops.pool_windows(items[..., :both], items[..., both:] + entries.bias)
    main = ops.rms_norm(pooled[:, :wide].to(cache.c4.dtype), weights.norm, config.rms_norm_eps)
    index = ops.rms_norm(pooled[:, wide:].to(cache.index.dtype), weights.index_norm, config.rms_norm_eps)
    ops.rotate(main.unsqueeze(1), step.turns.c4)
    ops.rotate(index.unsqueeze(1), step.turns.c4)
    cache.c4.index_copy_(0, entries.out_rows, step.rounding.latent(main))
    cache.index.index_copy_(0, entries.out_rows, step.rounding.index(index))


def close_c128(weights: CompressorWeights, step: LayerStep) -> None:
    """Writes the c128 entries of windows that close in the step to their pool."""
    cache, ops = step.cache, step.ops
    if step.pending is None:
        return
    assert cache.c128 is not None
    assert cache.c128_state is not None
    for entries, turns in zip(step.rows.c128, step.turns.c128, strict=True):
        state = started(cache.c128_state.index_select(0, entries.slots), entries.fresh)
        rows = step.pending.index_select(0, entries.rows.flatten()).view(*entries.rows.shape, -1)
        state = ops.fold(state, rows, entries.valid)
        pooled = (state[:, 2] / state[:, 1]).to(cache.c128.dtype)
        entry = ops.rms_norm(pooled, weights.norm, step.config.rms_norm_eps)
        ops.rotate(entry.unsqueeze(1), turns)
        cache.c128.index_copy_(0, entries.out_rows, step.rounding.latent(entry))


def started(state: Tensor, fresh: Tensor) -> Tensor:
    """State [n, 3, D], an empty one where `fresh` [n]: what the slot held belongs to a closed window."""
    empty = torch.zeros_like(state[:1])
    empty[:, 0] = EMPTY_MAX
    return torch.where(fresh.view(-1, 1, 1), empty, state)
