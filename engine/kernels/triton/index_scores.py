"""The lightning indexer's scores: products of heads with a key, cut at zero, weighted and summed over heads.

Keys fill the matrix unit's long side and heads its short one: a score is then a sum within few lanes. Keys
are read where they lie in the pool, once for two queries of a block, and never gathered in memory.
Source: DeepSeek-V4's indexer; `TorchOps.index_scores` states it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.faults import KEY_ROW, any_of, flag, report
from engine.kernels.triton.formats import product
from engine.kernels.triton.launch import ahead, await_previous
from engine.kernels.triton.linear import multiprocessors

MOST_HEADS = 128
"""Heads of all the queries of a program."""

SIZES = ["entries", "width", "tiles", "seen_stride"]
"""They change from step to step, and compile nothing anew."""


@dataclass(frozen=True)
class ScoreShape:
    """How scoring is cut: keys of a tile, queries and tiles of a program, warps, stages of the pipeline."""

    keys: int
    queries: int
    tiles: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["rows", "visible", "bias"])
def _index_scores(
    q, weights, keys, key_scales, rows, visible, bias, out, faults, entries, width, heads, pool_rows, tiles,
    seen_stride,
    TILE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    CHANNELS: tl.constexpr, COUNTED: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    # The groups of a block's queries follow each other: the second finds the keys in the cache.
    block = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    query = block * width + tl.where(own < width, own, 0)
    lane = tl.arange(0, QUERIES * HEADS)
    head, each = lane % HEADS, tl.program_id(0) * QUERIES + lane // HEADS
    # Lanes beyond the end read what is there, and weigh nothing.
    line = (block * width + tl.where(each < width, each, 0)) * heads + tl.where(head < heads, head, 0)
    channel = tl.arange(0, CHANNELS)
    await_previous()
    queries = tl.load(q + line[:, None] * CHANNELS + channel[None, :])
    weight = tl.load(weights + line, mask=head < heads, other=0.0)
    begin = tl.program_id(2) * (tiles * TILE)
    end = tl.minimum(begin + tiles * TILE, entries)
    if COUNTED:
        seen = tl.load(visible + query * seen_stride, mask=own < width, other=0).to(tl.int32)
        end = tl.minimum(end, tl.max(seen, 0))
    outside = tl.zeros((TILE,), tl.int32)
    for first in range(begin, end, TILE):
        entry = first + tl.arange(0, TILE)
        row = tl.load(rows + block * entries + entry, mask=entry < entries, other=0).to(tl.int64)
        real = (row > 0) & (row < pool_rows)
        outside |= ((row < -1) | (row >= pool_rows)).to(tl.int32)
        row = tl.where(real, row, 0)
        key = tl.load(keys + row[:, None] * CHANNELS + channel[None, :])
        if key.dtype == tl.float32:
            dots = tl.dot(key, tl.trans(queries), input_precision="tf32x3")
        else:
            dots = product(key, tl.trans(queries), None)
        dots = tl.reshape(tl.maximum(dots, 0.0) * weight[None, :], (TILE, QUERIES, HEADS))
        score = tl.sum(dots, 2)
        if CODED:
            score = score * tl.load(key_scales + row)[:, None]
        at = query[None, :] * entries + entry[:, None]
        held = (entry < entries)[:, None] & (own < width)[None, :]
        if COUNTED:
            score = tl.where(real[:, None] & (entry[:, None] < seen[None, :]), score, float("-inf"))
        else:
            score = tl.where(real[:, None], score + tl.load(bias + at, mask=held, other=0.0), float("-inf"))
        tl.store(out + at, score, mask=held)
    report(faults, flag(any_of(outside != 0), KEY_ROW))
    if COUNTED:
        # What no query of the group sees.
        done = begin + tl.cdiv(tl.maximum(end - begin, 0), TILE) * TILE
        for first in range(done, tl.minimum(begin + tiles * TILE, entries), TILE):
            entry = first + tl.arange(0, TILE)
            held = (entry < entries)[:, None] & (own < width)[None, :]
            nothing = tl.full((TILE, QUERIES), float("-inf"), tl.float32)
            tl.store(out + query[None, :] * entries + entry[:, None], nothing, mask=held)


def shape_for(q: Tensor, entries: int, processors: int) -> ScoreShape:
    """A cut for queries [blocks, W, heads, Di]: long strips of keys where there are enough for the device."""
    blocks, width, heads = q.shape[:3]
    queries = max(1, min(triton.next_power_of_2(width), MOST_HEADS // lanes_of(heads)))
    # On an H200 128 queries of 16,384 FP8 keys take 67 us so, 77 us by 64 keys; two of a block don't gain.
    alone = queries == 1 and q.dtype == torch.float8_e4m3fn
    keys = 32 if q.dtype == torch.float32 else 128 if alone else 64
    tiles, groups = 2048 // keys, blocks * triton.cdiv(width, queries)
    while tiles > 1 and groups * triton.cdiv(entries, keys * tiles) < 2 * processors:
        tiles //= 2
    # Two stages carry the row numbers, and two the keys that they lead to.
    return ScoreShape(keys, queries, tiles, 4, 4 if alone else 5)


def lanes_of(heads: int) -> int:
    """Lanes for so many heads: the matrix unit takes no fewer than 16."""
    return max(16, int(triton.next_power_of_2(heads)))


def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None, rows: Tensor, seen: Tensor,
    faults: Tensor, shape: ScoreShape | None = None,
) -> Tensor:  # fmt: skip
    """Scores of every entry for a block's queries; float32 [blocks, W, N], minus infinity where unseen.

    q           [blocks, W, heads, Di] in the keys' type, Di a power of two from 16
    weights     [blocks, W, heads] float32, constants folded in; with coded keys the scales of q too
    keys        [P, Di] bfloat16 or float32; or float8_e4m3fn with key_scales float32 [P]
    rows        [blocks, N] int32 or int64 pool rows; 0 and -1 are no key: minus infinity
    seen        int32 or int64 [blocks, W]: a query sees the entries before it, queries lying evenly; or
                float32 [blocks, W, N]: 0, or minus infinity where it doesn't see the entry
    faults      int32 [1]: KEY_ROW is added; the entry's score is minus infinity
    raises      ShapeMismatch
    """
    blocks, width, heads, channels = q.shape
    entries, counted = rows.shape[1], not seen.is_floating_point()
    wanted = (blocks, width) if counted else (blocks, width, entries)
    if tuple(seen.shape) != wanted or tuple(weights.shape) != (blocks, width, heads) or len(rows) != blocks:
        raise ShapeMismatch(f"q {tuple(q.shape)}, weights {tuple(weights.shape)}, seen {tuple(seen.shape)}")
    if channels < 16 or channels & (channels - 1) or keys.shape[1] != channels or keys.dtype != q.dtype:
        raise ShapeMismatch(
            f"queries {q.dtype} of {channels} channels, keys {keys.dtype} {tuple(keys.shape)}"
        )
    if (keys.dtype == torch.float8_e4m3fn) != (key_scales is not None):
        raise ShapeMismatch(f"keys {keys.dtype} with{'' if key_scales is not None else 'out'} scales")
    even = seen.stride(0) == width * seen.stride(1) or blocks < 2 if counted else seen.is_contiguous()
    if not even or any(not part.is_contiguous() for part in (q, weights, keys, rows)):
        raise ShapeMismatch("queries, weights, keys, rows and what is seen must be contiguous")
    out = torch.empty(blocks, width, entries, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    cut = shape or shape_for(q, entries, multiprocessors(q.device))
    grid = (triton.cdiv(width, cut.queries), blocks, triton.cdiv(entries, cut.keys * cut.tiles))
    _index_scores[grid](
        q, weights, keys, weights if key_scales is None else key_scales, rows, seen, seen, out, faults,
        entries, width, heads, keys.shape[0], cut.tiles, seen.stride(1), cut.keys, cut.queries,
        lanes_of(heads), channels, counted, key_scales is not None, num_warps=cut.warps,
        num_stages=cut.stages, **ahead(blocks * width),
    )  # fmt: skip
    return out
