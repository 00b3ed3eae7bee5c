"""What the layers need of one step: rows, query blocks, closing entries, caches. Built once, used by every
layer.

A *row* is one new token of one request. Flat pool rows are `page * rows_a_page + offset`; row 0 of every pool
is never written and stays zero, so an absent key points there and is masked by its bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class QueryBlocks:
    """Query blocks of one width: W consecutive rows of one request that share keys.

    rows         [blocks * W] int64, rows of the step, 0 for padding; None: all rows, in order
    width        W
    window_rows  [blocks, K]
    c4_rows      [blocks, N4] of every entry that a query of the block may see; c128_rows [blocks, N128]
    *_seen       what each query sees of the rows: a bias [blocks, W, K] float32, or where the kernel set is
                 `ranged` a range of them, [blocks W, 2] int32; see `engine.model.keys`

    c4_chosen    beside ranges, [blocks W, 2] int32: which of a query's chosen entries it sees, from the first

    Rows are int64 beside biases, and int32 beside ranges.
    """

    rows: Tensor | None
    width: int
    window_rows: Tensor
    window_seen: Tensor
    c4_rows: Tensor
    c4_seen: Tensor
    c128_rows: Tensor
    c128_seen: Tensor
    c4_chosen: Tensor | None = None


def of_blocks(values: Tensor, blocks: Sequence[QueryBlocks]) -> tuple[Tensor, ...]:
    """Of each block its rows of `values` [T, ...]."""
    return tuple(values if block.rows is None else values.index_select(0, block.rows) for block in blocks)


@dataclass(frozen=True)
class C4Entries:
    """The c4 windows that close in this step, E of them.

    ring_rows  [B * 8] int64, flat ring rows of the step's requests
    halves     [E, 8] int64 into the half rows of (ring rows, then step rows); A-half of row r is 2r, B-half
               2r + 1
    bias       [E, 8, 1] float32, minus infinity for the absent A-half of a request's first window
    positions  [E] int64, first token of each window
    out_rows   [E] int64, flat rows of the c4 and index pools
    """

    ring_rows: Tensor
    halves: Tensor
    bias: Tensor
    positions: Tensor
    out_rows: Tensor


@dataclass(frozen=True)
class C128Entries:
    """The c128 windows that close in this step, E of them; int64 [E] but for `fresh`.

    slots      request slots whose running state the windows continue
    fresh      bool, True where the window began in this step: the slot's state isn't read
    firsts     the first step row of each
    counts     how many rows from there, 1 to 128
    out_rows   flat rows of the c128 pool
    positions  first token of each window
    width      no window takes more rows than this
    """

    slots: Tensor
    fresh: Tensor
    firsts: Tensor
    counts: Tensor
    out_rows: Tensor
    positions: Tensor
    width: int


@dataclass(frozen=True)
class Turns:
    """Rotations of the step in both frequency tables: complex64 [n, 1, rope_dim / 2].

    *_back  the inverse ones, of each query block's rows
    """

    plain: Tensor
    plain_back: tuple[Tensor, ...]
    compressed: Tensor
    compressed_back: tuple[Tensor, ...]
    c4: Tensor | None
    c128: tuple[Tensor, ...]


@dataclass(frozen=True)
class StepRows:
    """Layer-invariant metadata of one step of T (padded) rows.

    positions     [T] int64
    latent_rows   [T] int64, flat window-pool rows that receive the rows' latents
    phase4        [T] int64, position mod 4; phase128 likewise
    blocks        query blocks, at most one entry a width
    unblock       [T] int64, place of each row in the concatenated blocks; None: already in order
    padding       [T] bool, rows that belong to no request; None: there are none
    agreed        rows that every rank brings to the experts, at least T where they are spread over ranks
    agreed_logits likewise, rows that need logits
    """

    positions: Tensor
    latent_rows: Tensor
    phase4: Tensor
    phase128: Tensor
    blocks: tuple[QueryBlocks, ...]
    unblock: Tensor | None
    c4: C4Entries | None
    c128: tuple[C128Entries, ...]
    padding: Tensor | None
    agreed: int
    agreed_logits: int


@dataclass(frozen=True)
class CommitGroup:
    """Requests of a step whose row counts are of one width class.

    requests  [n] int64, places in the step's request columns
    width     no request of the group has more rows than this
    """

    requests: Tensor
    width: int


@dataclass(frozen=True)
class CommitRows:
    """What `commit` needs of a step, whatever lengths it is then given; columns are int64 [B].

    slots, starts  request slots and the position of each request's first row
    first_rows     the step row of it
    counts         rows of each request
    most           largest row count of a request
    """

    slots: Tensor
    starts: Tensor
    first_rows: Tensor
    counts: Tensor
    most: int
    groups: tuple[CommitGroup, ...]


@dataclass(frozen=True)
class LayerCache:
    """Flat views of one layer's caches; None where the layer's kind has none.

    window [Pw, D]; c4 [P4, D]; index [P4, Di]; c128 [P128, D]; c4_ring [S * 8, 4 (D + Di)] float32;
    c128_state [S, 3, D] float32: running maximum, sum of weights, weighted latent
    FP8: window, c4 and c128 are uint8 [P, row bytes], index float8_e4m3fn with index_scales float32 [P4]
    """

    window: Tensor
    c4: Tensor | None
    index: Tensor | None
    c128: Tensor | None
    c4_ring: Tensor | None
    c128_state: Tensor | None
    index_scales: Tensor | None = None


@dataclass(frozen=True)
class Pending:
    """What a forward leaves for `commit`.

    c4    [c4 layers, T, 4 (D + Di)] float32; a row is A-half then B-half, each (latent, index latent, score,
          index score)
    c128  [c128 layers, T, 2 D] float32: latent, score
    taps  [taps, T, H]: mean over the streams of the chosen layers' outputs
    """

    c4: Tensor
    c128: Tensor
    taps: Tensor


@dataclass(frozen=True)
class StepOutput:
    """logits [R, V] float32 of the rows that were asked for, in their order."""

    logits: Tensor
    pending: Pending
