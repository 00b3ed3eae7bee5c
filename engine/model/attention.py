"""Attention of one layer: shared latent, window, compressed entries, sinks, grouped output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.coded_rows import Rows, values_of
from engine.model.compressor import close_c4, close_c128, pend
from engine.model.config import C4, C128, ModelConfig
from engine.model.keys import AnyKeys, Keys, SeenKeys, keys_of
from engine.model.ops import TorchOps
from engine.model.rounding import Rounding
from engine.model.step import LayerCache, QueryBlocks, StepRows, Turns
from engine.model.weights import AttentionWeights, IndexerWeights

SCORES = 1 << 26
"""Scores of entries that are held at once: 256 MiB of float32."""


@dataclass(frozen=True)
class LayerStep:
    """One layer's surroundings in one step.

    in_order  selected entries are attended to in ascending order (deterministic mode)
    pending   [T, C] float32, the layer's place for raw compressor rows
    """

    config: ModelConfig
    ops: TorchOps
    rounding: Rounding
    in_order: bool
    ratio: int
    rows: StepRows
    turns: Turns
    cache: LayerCache
    pending: Tensor | None


def attention(inputs: Rows, weights: AttentionWeights, step: LayerStep) -> Tensor:
    """Attention over normalised inputs [T, H]; writes the step's own pool rows; [T, H]."""
    config, ops, cache, x = step.config, step.ops, step.cache, values_of(inputs)
    eps = config.rms_norm_eps
    compressed = step.ratio != 0
    turns = step.turns.compressed if compressed else step.turns.plain
    first = ops.linear(inputs, weights.w_in)
    norms, places = (weights.q_norm, weights.kv_norm), step.rows.latent_rows
    lora = ops.norm_and_keep(first, *norms, turns, cache.window, places, eps, step.rounding)
    q = ops.linear(lora, weights.wq_b).view(-1, config.num_attention_heads, config.head_dim)
    if weights.compressor is not None and step.pending is not None:
        pend(x, weights.compressor, step.rows, step.pending, step.ratio, ops)
        close = close_c4 if step.ratio == C4 else close_c128
        close(weights.compressor, step)
    index = _index_queries(x, lora, weights.indexer, step) if _selects(step) else None
    out = _attend_blocks(q, index, turns, weights, step)
    return ops.linear(ops.group_linear(out.flatten(1), weights.wo_a), weights.wo_b)


def _attend_blocks(
    q: Tensor, index: tuple[Tensor, Tensor] | None, turns: Tensor, weights: AttentionWeights, step: LayerStep
) -> Tensor:
    """q [T, heads, D], as the product gives it, over every query block, turned back; [T, heads, D].

    index  what `_index_queries` gives, where entries are selected
    """
    outs, ops, eps = [], step.ops, step.config.rms_norm_eps
    back = step.turns.compressed_back if step.ratio else step.turns.plain_back
    for block, turned_back in zip(step.rows.blocks, back, strict=True):
        window = keys_of(step.cache.window, block.window_rows, block.window_seen)
        compressed = _compressed_keys(index, block, step)
        if block.rows is None:
            own = q.view(-1, block.width, *q.shape[1:])
            out = ops.attend_heads(own, turns, eps, window, compressed, weights.sink, turned_back)
        else:
            # Any number of blocks may have the same row: the product's stay as they are.
            own = ops.norm_rotate(q, turns, eps, block.rows).view(-1, block.width, *q.shape[1:])
            out = ops.attend_back(own, window, compressed, weights.sink, turned_back)
        outs.append(out.flatten(0, 1))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if step.rows.unblock is None else out.index_select(0, step.rows.unblock)


def _selects(step: LayerStep) -> bool:
    """Whether any block sees more c4 entries than are attended to."""
    most = max((block.c4_rows.shape[1] for block in step.rows.blocks), default=0)
    return step.ratio == C4 and most > step.config.index_topk


def _compressed_keys(
    inputs: tuple[Tensor, Tensor] | None, block: QueryBlocks, step: LayerStep
) -> AnyKeys | None:
    """The compressed entries that a block's queries see; None where there are none yet."""
    cache = step.cache
    if step.ratio == C128 and block.c128_rows.shape[1]:
        assert cache.c128 is not None
        return keys_of(cache.c128, block.c128_rows, block.c128_seen)
    if step.ratio != C4 or not block.c4_rows.shape[1]:
        return None
    assert cache.c4 is not None
    assert cache.index is not None
    every = keys_of(cache.c4, block.c4_rows, block.c4_seen)
    topk, entries = step.config.index_topk, block.c4_rows.shape[1]
    if entries <= topk:
        return every
    assert inputs is not None
    coded = cache.index_scales is not None
    q, head_weights = step.ops.index_queries(
        inputs[0], step.turns.compressed, inputs[1], step.rounding, coded, block.rows
    )
    q = q.view(-1, block.width, *q.shape[1:])
    head_weights = head_weights.view(-1, block.width, head_weights.shape[1])
    index = keys_of(cache.index, block.c4_rows, block.c4_seen, cache.index_scales)
    if isinstance(index, SeenKeys):
        return SeenKeys(cache.c4, _selected_rows(q, head_weights, index, step), block.c4_chosen)
    assert isinstance(every, Keys)
    scores = step.ops.index_scores(q, head_weights, index)
    chosen = step.ops.select_in_order(scores, topk) if step.in_order else step.ops.select(scores, topk)
    if block.width > 1 and entries <= step.ops.dense_entries * topk:
        bias = torch.full_like(every.bias, -torch.inf).scatter_(-1, chosen, 0.0)
        return Keys(cache.c4, every.rows, bias + every.bias)
    rows = every.rows.unsqueeze(1).expand(-1, block.width, -1).gather(-1, chosen)
    return Keys(cache.c4, rows.flatten(0, 1), every.bias.gather(-1, chosen))


def _selected_rows(q: Tensor, head_weights: Tensor, index: SeenKeys, step: LayerStep) -> Tensor:
    """Pool rows of each query's chosen entries, int32 [blocks W, topk]."""
    blocks, width, entries = *q.shape[:2], index.rows.shape[1]
    at_once = max(1, SCORES // (width * entries))
    assert index.seen is not None
    seen, chosen = index.seen.view(blocks, -1), []
    for first in range(0, blocks, at_once):
        some = slice(first, first + at_once)
        own = SeenKeys(index.pool, index.rows[some], seen[some].view(-1, 2), index.scales)
        scores = step.ops.index_scores(q[some], head_weights[some], own)
        chosen.append(step.ops.select_rows(scores, own.rows, step.config.index_topk))
    return (chosen[0] if len(chosen) == 1 else torch.cat(chosen)).flatten(0, 1)


def _index_queries(
    x: Tensor, lora: Rows, weights: IndexerWeights | None, step: LayerStep
) -> tuple[Tensor, Tensor]:
    """What `TorchOps.index_queries` takes of all rows: queries [T, heads, Di] and weights [T, heads]."""
    assert weights is not None
    config, ops = step.config, step.ops
    q = ops.linear(lora, weights.wq_b).view(-1, config.index_n_heads, config.index_head_dim)
    return q, ops.index_weights(x, weights.head_weights)
