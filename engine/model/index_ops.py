"""The lightning indexer in plain torch: queries, scores, and which entries are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.attention_ops import AttentionOps
from engine.model.keys import AnyKeys, dense
from engine.model.latent_rows import read_keys
from engine.model.rounding import Rounding, index_codes

# Scores of one call of index_scores before they are summed over heads: 256 MiB of float32.
SCORE_ELEMENTS = 1 << 26


class IndexOps(AttentionOps):
    """The part of `TorchOps` that the indexer uses, and attention's."""

    def index_queries(
        self, q: Tensor, turns: Tensor, weights: Tensor, rounding: Rounding, coded: bool,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Queries as `index_scores` takes them, and the heads' weights; perhaps in q's memory.

        q        [T, heads, Di], turned by turns [T, 1, r / 2] complex64, then rounded
        weights  [T, heads] float32, which may take the queries' scales
        coded    keys are in FP8: queries are rounded likewise, else as `rounding` says
        rows     [n] int64: the results have these rows, and q stays as it is; None: all
        """
        if rows is not None:
            q, turns, weights = (part.index_select(0, rows) for part in (q, turns, weights))
        self.rotate(q, turns)
        if not coded:
            return rounding.index(q), weights
        codes, scales = index_codes(q)
        return codes.float() * scales.unsqueeze(-1), weights

    def index_scores(self, q: Tensor, head_weights: Tensor, keys: AnyKeys) -> Tensor:
        """Lightning-indexer scores.

        q             [blocks, W, heads, Di]
        head_weights  [blocks, W, heads] float32, constants folded in
        keys          rows of every entry, shared by a block's queries, and which are seen; ranges begin at 0
        returns       [blocks, W, N] float32, minus infinity where unseen
        """
        blocks, width, heads, wide = q.shape
        keys = dense(keys, blocks, width)
        entries = keys.rows.shape[1]
        step = max(1, SCORE_ELEMENTS // max(1, width * heads * entries))
        out = torch.empty(blocks, width, entries, dtype=torch.float32, device=q.device)
        for first in range(0, blocks, step):
            some = slice(first, first + step)
            own = read_keys(keys.pool, keys.scales, keys.rows[some].flatten()).view(-1, entries, wide)
            dots = torch.bmm(q[some].reshape(-1, width * heads, wide), own.transpose(1, 2)).float().relu_()
            weights = head_weights[some].reshape(-1, 1, heads)
            out[some] = torch.bmm(weights, dots.view(-1, heads, entries)).view(-1, width, entries)
        return out.add_(keys.bias)

    def warm(self, entries: int, count: int) -> None:
        """Before the first request: compiles what selecting `count` of up to `entries` needs, if anything."""

    def select(self, scores: Tensor, count: int) -> Tensor:
        """Indices of the `count` largest of scores [..., N], in any order; [..., count] int64."""
        return scores.topk(count, dim=-1, sorted=False).indices

    def select_in_order(self, scores: Tensor, count: int) -> Tensor:
        """As `select`, of equal scores the earlier one, in ascending order; unseen entries go last.

        Zeros are equal, and NaN of either sign is the largest. Seen entries then stand where they would stand
        without selection, in whatever company.
        """
        # Not every device sorts by values: some put NaN by its sign.
        told = (scores + 0.0).masked_fill(scores.isnan(), torch.nan)
        chosen = told.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        unseen = scores.gather(-1, chosen).isneginf()
        return torch.where(unseen, scores.shape[-1] - 1, chosen).sort(dim=-1).values

    def select_rows(self, scores: Tensor, rows: Tensor, count: int) -> Tensor:
        """Pool rows of the entries that `select_in_order` chooses, int32 [blocks, W, count].

        scores [blocks, W, N] of the entries in pool rows `rows` [blocks, N]; 0 stands last for each missing
        """
        chosen = self.select_in_order(scores, count)
        own = rows.unsqueeze(1).expand(-1, scores.shape[1], -1).gather(-1, chosen)
        return own.masked_fill_(scores.gather(-1, chosen).isneginf(), 0).int()

    def entry_rows(
        self, pages: Tensor, visible: Tensor, entries: int, page_rows: int, pool_pages: int
    ) -> Tensor:
        """Pool rows of each block's first entries; int32 [blocks, N], 0 from the last visible one on.

        pages       [blocks, M] page numbers of each block's request, in order
        visible     [blocks]: entries that any query of the block sees
        entries     N, at most M page_rows
        page_rows   entries of a page
        pool_pages  pages of the pool: what is mapped to none of them, or to the sink, has row 0
        """
        lane = torch.arange(entries, device=pages.device)
        page = pages.index_select(1, lane // page_rows)
        real = (lane < visible.unsqueeze(1)) & (page > 0) & (page < pool_pages)
        return (page * page_rows + lane % page_rows).masked_fill_(~real, 0).int()
