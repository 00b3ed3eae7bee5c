"""Keys of attention and of the indexer: rows of a pool, and which of them each query sees.

Rows 0 and -1 are absent keys: row 0 of every pool stays zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Keys:
    """Keys (that are values too) of a class of query blocks, each query seeing what a bias says.

    pool    [P, D], all rows of one layer's cache: values, FP8 rows, or index keys
    rows    [n, K] int64 flat pool rows; n is the number of blocks (keys shared by a block's queries) or of
            queries
    bias    [blocks, W, K] float32, 0 where the query sees the key, else minus infinity
    scales  float32 [P] of index keys in FP8; else None
    """

    pool: Tensor
    rows: Tensor
    bias: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class SeenKeys:
    """Keys of a class of query blocks, each query seeing a range of its row list.

    pool, scales  as in Keys
    rows          [n, K] int64 or int32 pool rows, n blocks or queries; 0 and -1 are absent keys
    seen          [blocks W, 2] int32: first column and count of each query, cut to those that are; None: all
    """

    pool: Tensor
    rows: Tensor
    seen: Tensor | None
    scales: Tensor | None = None


AnyKeys = Keys | SeenKeys


def keys_of(pool: Tensor, rows: Tensor, seen: Tensor, scales: Tensor | None = None) -> AnyKeys:
    """Keys by a bias (float32) or by ranges (int32), whichever `seen` holds."""
    return (Keys if seen.is_floating_point() else SeenKeys)(pool, rows, seen, scales)


def counts(keys: SeenKeys, q: Tensor) -> Tensor:
    """How many of its rows each query of q [blocks, W, ...] sees, as a view, int32 [blocks, W]."""
    assert keys.seen is not None
    return keys.seen.view(*q.shape[:2], 2)[:, :, 1]


def dense(keys: AnyKeys, blocks: int, width: int) -> Keys:
    """The same keys by a bias, of `blocks` of `width` queries; Keys as they are.

    Of ranges, rows that are absent or outside the pool aren't seen, and read row 0.
    """
    if isinstance(keys, Keys):
        return keys
    rows = keys.rows.long()
    real, (lists, columns) = (rows > 0) & (rows < len(keys.pool)), rows.shape
    each = real.unsqueeze(1).expand(-1, blocks * width // max(1, lists), -1)
    bias = torch.zeros(blocks, width, columns, device=rows.device)
    bias.masked_fill_(~each.reshape(blocks, width, columns), -torch.inf)
    if keys.seen is not None:
        first, count = keys.seen.view(blocks, width, 2, 1).unbind(2)
        column = torch.arange(columns, device=rows.device)
        bias.masked_fill_((column < first) | (column >= first + count), -torch.inf)
    return Keys(keys.pool, torch.where(real, rows, 0), bias, keys.scales)
