"""The arithmetic of attention in plain torch: heads, caches, compressed entries.

Arithmetic is float32 inside; results have the type of the first argument unless a line says otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.coded_rows import Rows
from engine.model.compressor import started
from engine.model.config import C4, C128
from engine.model.keys import AnyKeys, dense
from engine.model.latent_rows import read_latents, write_keys, write_latents
from engine.model.rope import turns
from engine.model.rounding import Rounding
from engine.model.step import C4Entries, C128Entries, CommitRows


class AttentionOps:
    """The part of `TorchOps` that attention alone uses, and the norm.

    Pools of latents hold values, or FP8 rows (uint8), which round whatever is written to them.

    dense_entries  a block's queries look at all entries, most of them masked, up to this many times as many
                   as are selected; beyond it each query's selected ones are looked up
    ranged         plans tell what a query sees by ranges of its row list instead of a bias, and selected
                   entries by their pool rows; windows that close are planned as one list
    """

    dense_entries = 8
    ranged = False

    faults: Tensor | None = None
    """int32 [1] on the device: bits of what indices pointed outside; None: nothing tells."""

    def check(self) -> None:
        """Waits for the device. raises PageAccounting where a kernel has met indices outside by now"""

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """RMSNorm over the last dimension, weight [last] float32 or none; x's type."""
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        """As `rms_norm`, x [T, K]: for products."""
        return self.rms_norm(x, weight, eps)

    def turns(self, positions: Tensor, table: Tensor) -> Tensor:
        """Rotations at positions [n], complex64 [n, 1, r / 2]; table [r / 2] as of `rope.frequencies`."""
        return turns(positions, table)

    def turns_and_back(self, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """As `turns`, and beside them those that undo them."""
        forward = self.turns(positions, table)
        return forward, forward.conj().resolve_conj()

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        """Rotates in place pairs (2i, 2i + 1) of the last r channels of x [T, ..., D].

        turns  [T, ..., r / 2] complex64
        """
        half = turns.shape[-1]
        pairs = x[..., -2 * half :].view(*x.shape[:-1], half, 2)
        if x.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(turns)
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))

    def norm_rotate(self, x: Tensor, turns: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
        """RMSNorm of each head x [T, heads, D] without weight, then `rotate`; perhaps in x's memory.

        turns  [T, 1, r / 2] complex64
        rows   [n] int64: the result has these rows, and x stays as it is; None: all
        """
        if rows is not None:
            x, turns = x.index_select(0, rows), turns.index_select(0, rows)
        x = self.rms_norm(x, None, eps)
        self.rotate(x, turns)
        return x

    def keep_latent(
        self, x: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor, eps: float,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        """Writes latents x [T, D], normalised, rotated and rounded, to rows `places` [T] int64 of a pool."""
        latent = self.rms_norm(x, weight, eps)
        self.rotate(latent.unsqueeze(1), turns)
        write_latents(pool, places, latent, rounding)

    def norm_and_keep(
        self, first: Tensor, q_weight: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor,
        eps: float, rounding: Rounding,
    ) -> Rows:  # fmt: skip
        """What one product gives for queries and for the cache: `norm_rows` of the former, `keep_latent`.

        first  [T, Q + D]; q_weight [Q] and weight [D] float32
        """
        wide = len(q_weight)
        q = self.norm_rows(first[:, :wide], q_weight, eps)
        self.keep_latent(first[:, wide:], weight, turns, pool, places, eps, rounding)
        return q

    def attend(self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor) -> Tensor:
        """One softmax over window keys, compressed keys and the sink; values are the keys.

        q        [blocks, W, heads, D]
        sink     [heads] float32, an unscaled logit without a value
        returns  [blocks, W, heads, D]
        """
        blocks, width, heads, wide = q.shape
        given = [window] if compressed is None else [window, compressed]
        parts = [dense(part, blocks, width) for part in given]
        keys = [
            read_latents(part.pool, part.rows.flatten(), q).view(*part.rows.shape, wide) for part in parts
        ]
        scores = []
        for part, own in zip(parts, keys, strict=True):
            score = torch.bmm(q.view(own.shape[0], -1, wide), own.transpose(1, 2)).float()
            score = score.view(blocks, width, heads, -1)
            scores.append(torch.add(part.bias.unsqueeze(2), score, alpha=wide**-0.5))
        scores.append(sink.view(1, 1, heads, 1).expand(blocks, width, heads, 1))
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(q.dtype)
        out, first = None, 0
        for own in keys:
            share = weights[..., first : first + own.shape[1]].reshape(own.shape[0], -1, own.shape[1])
            first += own.shape[1]
            value = torch.bmm(share, own).view(q.shape)
            out = value if out is None else out + value
        assert out is not None
        return out

    def attend_back(
        self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor, turns: Tensor
    ) -> Tensor:
        """As `attend`, the results turned by `turns` [blocks W, 1, r / 2], back from their positions."""
        out = self.attend(q, window, compressed, sink)
        self.rotate(out.flatten(0, 1), turns)
        return out

    def attend_heads(
        self, q: Tensor, turns: Tensor, eps: float, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor,
        back: Tensor,
    ) -> Tensor:  # fmt: skip
        """`norm_rotate` of the queries' heads by `turns` [blocks W, 1, r / 2], then `attend_back` by `back`.

        q  [blocks, W, heads, D] as a product gives them, perhaps changed
        """
        heads = self.norm_rotate(q.flatten(0, 1), turns, eps).view(q.shape)
        return self.attend_back(heads, window, compressed, sink, back)

    def pool_windows(self, latents: Tensor, scores: Tensor) -> Tensor:
        """Softmax over a window's items, a channel at a time: latents, scores [E, W, C] float32; [E, C]."""
        return (torch.softmax(scores, dim=1) * latents).sum(1)

    def fold(self, state: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
        """The online c128 state after more tokens.

        state    [E, 3, D] float32: running maximum, sum of weights, weighted latent; an empty one has sum 0
        rows     [E, W, 2 D] float32: latent, then score; valid [E, W] bool
        returns  [E, 3, D]
        """
        latent, score = rows.chunk(2, dim=2)
        score = score.masked_fill(~valid.unsqueeze(2), -torch.inf)
        top = torch.maximum(state[:, 0], score.amax(1))
        kept = torch.exp(state[:, 0] - top)
        weights = torch.exp(score - top.unsqueeze(1))
        total = state[:, 1] * kept + weights.sum(1)
        return torch.stack([top, total, state[:, 2] * kept + (weights * latent).sum(1)], dim=1)

    def close_c4(
        self, ring: Tensor, pending: Tensor, entries: C4Entries, turns: Tensor, norms: tuple[Tensor, Tensor],
        eps: float, pools: tuple[Tensor, ...], rounding: Rounding,
    ) -> None:  # fmt: skip
        """Writes the c4 and index entries of windows that close to their pools.

        ring     [S 8, 4 (D + Di)] float32, pending [T, 4 (D + Di)] float32
        turns    [E, 1, r / 2] complex64, at the entries' positions
        norms    [D] and [Di] float32
        pools    of latents [P, D or row bytes] and index keys [P, Di]; with keys in FP8 their scales [P] too
        """
        count, wide = entries.out_rows.shape[0], norms[0].shape[0]
        both = wide + norms[1].shape[0]
        source = torch.cat([ring.index_select(0, entries.ring_rows), pending])
        items = source.view(-1, 2 * both).index_select(0, entries.halves.flatten())
        items = items.view(count, 2 * C4, 2 * both)
        pooled = self.pool_windows(items[..., :both], items[..., both:] + entries.bias)
        main = self.rms_norm(pooled[:, :wide].to(rounding.type_in(pools[0])), norms[0], eps)
        index = self.rms_norm(pooled[:, wide:].to(rounding.type_in(pools[1])), norms[1], eps)
        self.rotate(main.unsqueeze(1), turns)
        self.rotate(index.unsqueeze(1), turns)
        write_latents(pools[0], entries.out_rows, main, rounding)
        write_keys(pools[1], pools[2] if len(pools) > 2 else None, entries.out_rows, index, rounding)

    def close_c128(
        self, states: Tensor, pending: Tensor, entries: C128Entries, turns: Tensor, norm: Tensor, eps: float,
        pool: Tensor, rounding: Rounding,
    ) -> None:  # fmt: skip
        """Writes the c128 entries of windows that close to their pool of latents; states [S, 3, D] stay.

        pending  [T, 2 D] float32; turns [E, 1, r / 2] complex64, at the entries' positions
        """
        state = started(states.index_select(0, entries.slots), entries.fresh)
        lane = torch.arange(entries.width, device=pending.device)
        valid = lane < entries.counts.unsqueeze(1)
        rows = torch.where(valid, entries.firsts.unsqueeze(1) + lane, 0)
        items = pending.index_select(0, rows.flatten()).view(*rows.shape, -1)
        state = self.fold(state, items, valid)
        entry = self.rms_norm((state[:, 2] / state[:, 1]).to(rounding.type_in(pool)), norm, eps)
        self.rotate(entry.unsqueeze(1), turns)
        write_latents(pool, entries.out_rows, entry, rounding)

    def commit_c4(self, ring: Tensor, raw: Tensor, rows: CommitRows, lens: Tensor) -> None:
        """Writes the last (at most eight) committed raw rows of each request at their position mod 8.

        ring  [layers, S 8, C] float32, raw [layers, T, C] float32; lens int64 [B] rows are committed
        """
        size = 2 * C4
        kept = min(rows.most, size)
        step = lens.unsqueeze(1) - kept + torch.arange(kept, device=lens.device)
        place = rows.slots.unsqueeze(1) * size + (rows.starts.unsqueeze(1) + step) % size
        place = torch.where(step >= 0, place, 0).flatten()
        source = (rows.first_rows.unsqueeze(1) + step.clamp_min(0)).flatten()
        ring.index_copy_(1, place, raw.index_select(1, source))

    def commit_c128(self, states: Tensor, raw: Tensor, rows: CommitRows, lens: Tensor) -> None:
        """Folds the committed rows of each request's open window into its online state.

        states  [layers, S, 3, D] float32, raw [layers, T, 2 D] float32; lens as of commit_c4
        """
        for group in rows.groups:
            slots, starts, first, length = (
                column.index_select(0, group.requests)
                for column in (rows.slots, rows.starts, rows.first_rows, lens)
            )
            window = (starts + length) // C128 * C128
            begin = (window - starts).clamp_min(0).unsqueeze(1)
            step = begin + torch.arange(group.width, device=lens.device)
            valid = step < length.unsqueeze(1)
            layers, requests = raw.shape[0], slots.shape[0]
            source = torch.where(valid, first.unsqueeze(1) + step, 0).flatten()
            items = raw.index_select(1, source).view(layers * requests, group.width, -1)
            old = started(states.index_select(1, slots).flatten(0, 1), (window >= starts).repeat(layers))
            new = self.fold(old, items, valid.repeat(layers, 1))
            states.index_copy_(1, slots, new.view(layers, requests, 3, -1))
