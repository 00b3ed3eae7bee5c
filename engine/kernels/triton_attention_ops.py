"""Attention's operations on a device by Triton kernels: heads, caches, compressed entries, the indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.triton.attend import AttendShape, attend
from engine.kernels.triton.compress_c4 import close_c4
from engine.kernels.triton.compress_c128 import close_c128
from engine.kernels.triton.compress_commit import Committed, commit_c4, commit_c128
from engine.kernels.triton.compress_entry import IndexPool
from engine.kernels.triton.entry_rows import entry_rows
from engine.kernels.triton.index_queries import code_queries, round_queries
from engine.kernels.triton.index_scores import ScoreShape, index_scores
from engine.kernels.triton.launch import FEW_ROWS
from engine.kernels.triton.linear import multiprocessors
from engine.kernels.triton.norm import norm_rows, rms_norm
from engine.kernels.triton.rope import Heads, q_norm_rope, rotate
from engine.kernels.triton.select_entries import select_in_order, select_rows
from engine.kernels.triton.store import norm_and_store, norm_rope_store
from engine.kernels.triton.turns import turns, turns_and_back
from engine.model.coded_rows import Rows
from engine.model.keys import AnyKeys, Keys, counts
from engine.model.ops import TorchOps
from engine.model.rounding import Rounding
from engine.model.step import C4Entries, C128Entries, CommitRows


class TritonAttentionOps(TorchOps):
    """The part of `TritonOps` that attention alone uses, and the norms.

    faults  int32 [1] on the device: what indices pointed outside, see `triton/faults.py`
    """

    faults: Tensor
    score_shape: ScoreShape | None = None
    """How scoring is cut; None: by the step's queries."""

    def _attend_shape(self, window: AnyKeys) -> AttendShape | None:
        """How attention over such a pool is cut; None: by the step's queries."""
        return None

    def warm(self, entries: int, count: int) -> None:
        """As TorchOps.warm: what selects is compiled for each power of two of entries, few rows or many.

        Few are launched early, some are selected from in parts too, and many aren't.
        """
        columns, many = count, multiprocessors(self.faults.device) + 1
        while columns < 2 * entries:
            for queries in (1, FEW_ROWS + 1, many):
                scores = torch.zeros(queries, 1, columns, device=self.faults.device)
                self.select_rows(scores, scores.squeeze(1).to(torch.int32), count)
            columns *= 2

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """As TorchOps.rms_norm."""
        return rms_norm(x, weight, eps)

    def turns(self, positions: Tensor, table: Tensor) -> Tensor:
        """As TorchOps.turns."""
        return turns(positions, table)

    def turns_and_back(self, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """As TorchOps.turns_and_back, in one kernel."""
        return turns_and_back(positions, table)

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        """As TorchOps.rotate, x [T, heads, D]."""
        rotate(x, turns)

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        """As TorchOps.norm_rows; they come with their codes."""
        return norm_rows(x, weight, eps)

    def norm_rotate(self, x: Tensor, turns: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
        """As TorchOps.norm_rotate; of all rows in place."""
        return q_norm_rope(x, turns, eps, rows)

    def keep_latent(
        self, x: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor, eps: float,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        """As TorchOps.keep_latent."""
        norm_rope_store(x, weight, turns, pool, places, eps, self.faults, rounding.simulated)

    def norm_and_keep(
        self, first: Tensor, q_weight: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor,
        eps: float, rounding: Rounding,
    ) -> Rows:  # fmt: skip
        """As TorchOps.norm_and_keep, in one kernel; the rows come with their codes."""
        simulated = rounding.simulated
        return norm_and_store(first, q_weight, weight, turns, pool, places, eps, self.faults, simulated)

    def attend(self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor) -> Tensor:
        """As TorchOps.attend; a row of 0 or -1 is no key."""
        return attend(q, window, compressed, sink, self.faults, shape=self._attend_shape(window))

    def attend_back(
        self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor, turns: Tensor
    ) -> Tensor:
        """As TorchOps.attend_back, in one kernel."""
        return attend(q, window, compressed, sink, self.faults, turns, shape=self._attend_shape(window))

    def attend_heads(
        self, q: Tensor, turns: Tensor, eps: float, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor,
        back: Tensor,
    ) -> Tensor:  # fmt: skip
        """As TorchOps.attend_heads; of few queries in one kernel."""
        if self._attend_shape(window) is not None or q.shape[0] * q.shape[1] > FEW_ROWS:
            return super().attend_heads(q, turns, eps, window, compressed, sink, back)
        return attend(q, window, compressed, sink, self.faults, back, before=Heads(turns, eps))

    def close_c4(
        self, ring: Tensor, pending: Tensor, entries: C4Entries, turns: Tensor, norms: tuple[Tensor, Tensor],
        eps: float, pools: tuple[Tensor, ...], rounding: Rounding,
    ) -> None:  # fmt: skip
        """As TorchOps.close_c4."""
        scales = pools[2] if len(pools) > 2 else None
        keys = IndexPool(pools[1], scales is None and _to_fp4(rounding), scales)
        close_c4(ring, pending, entries, turns, *norms, eps, pools[0], keys, self.faults, rounding.simulated)

    def close_c128(
        self, states: Tensor, pending: Tensor, entries: C128Entries, turns: Tensor, norm: Tensor, eps: float,
        pool: Tensor, rounding: Rounding,
    ) -> None:  # fmt: skip
        """As TorchOps.close_c128."""
        close_c128(states, pending, entries, turns, norm, eps, pool, self.faults, rounding.simulated)

    def commit_c4(self, ring: Tensor, raw: Tensor, rows: CommitRows, lens: Tensor) -> None:
        """As TorchOps.commit_c4."""
        commit_c4(ring, raw, committed(rows, lens), self.faults)

    def commit_c128(self, states: Tensor, raw: Tensor, rows: CommitRows, lens: Tensor) -> None:
        """As TorchOps.commit_c128."""
        commit_c128(states, raw, committed(rows, lens), self.faults)

    def index_queries(
        self, q: Tensor, turns: Tensor, weights: Tensor, rounding: Rounding, coded: bool,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As TorchOps.index_queries, in one kernel; of coded queries the weights take the scales."""
        if coded:
            return code_queries(q, turns, weights, rows)
        weights = weights.sum(0) if weights.dim() == 3 else weights
        if rows is not None:
            weights = weights.index_select(0, rows)
        if _to_fp4(rounding):
            return round_queries(q, turns, rows), weights
        if rows is not None:
            q, turns = q.index_select(0, rows), turns.index_select(0, rows)
        rotate(q, turns)
        return q, weights

    def index_scores(self, q: Tensor, head_weights: Tensor, keys: AnyKeys) -> Tensor:
        """As TorchOps.index_scores; a row of 0 or -1 is no key."""
        seen = keys.bias if isinstance(keys, Keys) else counts(keys, q)
        cut = self.score_shape
        return index_scores(q, head_weights, keys.pool, keys.scales, keys.rows, seen, self.faults, cut)

    def select_rows(self, scores: Tensor, rows: Tensor, count: int) -> Tensor:
        """As TorchOps.select_rows."""
        return select_rows(scores, rows, count)

    def entry_rows(
        self, pages: Tensor, visible: Tensor, entries: int, page_rows: int, pool_pages: int
    ) -> Tensor:
        """As TorchOps.entry_rows; what is seen of a page that isn't mapped is a fault."""
        return entry_rows(pages, visible, entries, page_rows, pool_pages, self.faults)

    def select(self, scores: Tensor, count: int) -> Tensor:
        """As TorchOps.select_in_order."""
        return select_in_order(scores, count)

    def select_in_order(self, scores: Tensor, count: int) -> Tensor:
        """As TorchOps.select_in_order."""
        return select_in_order(scores, count)


def _to_fp4(rounding: Rounding) -> bool:
    """Whether index queries and keys of a pool of values are rounded. raises ConfigError where not to FP4"""
    if rounding.mode == "fp8":
        raise ConfigError("the kernels keep FP8 index keys as codes: give FP8 pools, not simulated rounding")
    return rounding.simulated


def committed(rows: CommitRows, lens: Tensor) -> Committed:
    """What a step commits, as kernels take it."""
    return Committed(rows.slots, rows.starts, rows.first_rows, rows.counts, lens)
