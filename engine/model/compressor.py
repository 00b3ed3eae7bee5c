"""The compressors of c4 and c128 layers: raw rows of a step, and the entries that close in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.config import C4
from engine.model.step import StepRows

if TYPE_CHECKING:
    from engine.model.attention import LayerStep
    from engine.model.ops import TorchOps
    from engine.model.weights import CompressorWeights

# The running maximum of an empty online state: finite, so that no difference of maxima is a NaN.
EMPTY_MAX = -1e30


def pend(
    x: Tensor, weights: CompressorWeights, rows: StepRows, pending: Tensor, ratio: int, ops: TorchOps
) -> None:
    """Writes the raw rows (latents, and scores with their position bias) of x [T, H] to pending [T, C]."""
    phase = rows.phase4 if ratio == C4 else rows.phase128
    ops.linear_to(x, weights.side, weights.ape, phase, pending)


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
    norms: tuple[Tensor, Tensor] = (weights.norm, weights.index_norm)
    pools: tuple[Tensor, ...] = (cache.c4, cache.index)
    if cache.index_scales is not None:
        pools = (*pools, cache.index_scales)
    eps = config.rms_norm_eps
    ops.close_c4(cache.c4_ring, step.pending, entries, step.turns.c4, norms, eps, pools, step.rounding)


def close_c128(weights: CompressorWeights, step: LayerStep) -> None:
    """Writes the c128 entries of windows that close in the step to their pool."""
    cache, ops = step.cache, step.ops
    if step.pending is None:
        return
    assert cache.c128 is not None
    assert cache.c128_state is not None
    eps = step.config.rms_norm_eps
    for entries, turns in zip(step.rows.c128, step.turns.c128, strict=True):
        ops.close_c128(
            cache.c128_state, step.pending, entries, turns, weights.norm, eps, cache.c128, step.rounding
        )


def started(state: Tensor, fresh: Tensor) -> Tensor:
    """State [n, 3, D], an empty one where `fresh` [n]: what the slot held belongs to a closed window."""
    empty = torch.zeros_like(state[:1])
    empty[:, 0] = EMPTY_MAX
    return torch.where(fresh.view(-1, 1, 1), empty, state)
