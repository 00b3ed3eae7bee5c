"""Row-invariant arithmetic: every operation runs on tiles of exactly 32 rows, in a fixed order of reduction.

A row's bits then depend on its own inputs alone: matrix kernels, vector tails and reductions see the same
shape whatever else is in the batch. Keys are reduced in fixed tiles counted from the start; a tile that is
masked for a row changes nothing of it. Costs: small steps are padded, experts are computed densely.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.coded_rows import Rows, values_of
from engine.model.expert_weights import MoeWeights
from engine.model.keys import AnyKeys, Keys, dense
from engine.model.latent_rows import read_latents
from engine.model.ops import TorchOps
from engine.model.quantised import Weight
from engine.model.weights import HeadWeights, MhcWeights

ROW_TILE = 32
KEY_TILE = 64


def tiled(call: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`call` on tiles of 32 rows of each argument, joined; the last tile is padded with its first row."""
    count = rows[0].shape[0]
    if count == ROW_TILE:
        return call(*rows)
    outs = []
    for first in range(0, count, ROW_TILE):
        some = [tensor[first : first + ROW_TILE] for tensor in rows]
        missing = ROW_TILE - some[0].shape[0]
        if missing:
            some = [torch.cat([t, t[:1].expand(missing, *t.shape[1:])]) for t in some]
        outs.append(call(*some))
    return torch.cat(outs)[:count]


def in_order(rows: Tensor) -> Tensor:
    """The sum over dimension 1 of rows [T, k, H] in float32, added one by one from the first."""
    total = rows[:, 0].float()
    for choice in range(1, rows.shape[1]):
        total = total + rows[:, choice]
    return total


class TileOps(TorchOps):
    """TorchOps whose rows are independent, bit for bit."""

    name = "tiles"
    row_tile = ROW_TILE
    row_invariant = True

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        """As TorchOps.linear, in tiles."""
        plain = super().linear
        return tiled(lambda rows: plain(rows.contiguous(), weight), values_of(x))

    def linear_to(self, x: Tensor, weight: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
        """As TorchOps.linear_to, in tiles."""
        out.copy_(self.linear(x.float(), weight) + biases.index_select(0, at))

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """As TorchOps.group_linear, in tiles."""
        plain = super().group_linear
        return tiled(lambda rows: plain(rows, weight), x)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """As TorchOps.rms_norm, in tiles."""
        plain = super().rms_norm
        return tiled(lambda rows: plain(rows.contiguous(), weight, eps), x)

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        """As TorchOps.rotate, from products that are rounded one by one."""
        half = turns.shape[-1]
        pairs = x[..., -2 * half :].view(*x.shape[:-1], half, 2)
        even, odd = pairs[..., 0].float(), pairs[..., 1].float()
        cos, sin = turns.real, turns.imag
        first, second = even * cos - odd * sin, even * sin + odd * cos
        pairs.copy_(torch.stack([first, second], dim=-1))

    def mhc_pre(
        self, streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
    ) -> tuple[Rows, Tensor, Tensor]:
        """As TorchOps.mhc_pre, in tiles."""
        plain, hc, hidden = super().mhc_pre, streams.shape[1], streams.shape[2]

        def joined(rows: Tensor) -> Tensor:
            x, post, comb = plain(rows, mhc, iterations, hc_eps, eps)
            return torch.cat([values_of(x).float(), post, comb.flatten(1)], dim=1)

        x, post, comb = torch.split(tiled(joined, streams), [hidden, hc, hc * hc], dim=1)
        return x.to(streams.dtype), post, comb.reshape(-1, hc, hc)

    def mhc_post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """As TorchOps.mhc_post, in tiles."""
        plain = super().mhc_post
        return tiled(lambda *rows: plain(*(row.contiguous() for row in rows)), y, streams, post, comb)

    def collapse(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """As TorchOps.collapse, in tiles."""
        plain = super().collapse
        return tiled(lambda rows: plain(rows, head, hc_eps, eps), streams)

    def attend(self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor) -> Tensor:
        """As TorchOps.attend, blocks of one row; window keys first, then compressed keys in tiles of 64."""
        window = dense(window, *q.shape[:2])
        compressed = None if compressed is None else dense(compressed, *q.shape[:2])

        def of_rows(rows: Tensor, near: Tensor, near_bias: Tensor, *far: Tensor) -> Tensor:
            parts = [Keys(window.pool, near, near_bias)]
            if compressed is not None:
                parts += _key_tiles(compressed, *far)
            return _attend_tiles(rows, parts, sink)

        far = () if compressed is None else (compressed.rows, compressed.bias)
        return tiled(of_rows, q, window.rows, window.bias, *far)

    def pool_windows(self, latents: Tensor, scores: Tensor) -> Tensor:
        """As TorchOps.pool_windows, item by item."""

        def of_rows(own: Tensor, score: Tensor) -> Tensor:
            weights = torch.exp(score - score.amax(1, keepdim=True))
            total, out = weights[:, 0], weights[:, 0] * own[:, 0]
            for item in range(1, own.shape[1]):
                total = total + weights[:, item]
                out = out + weights[:, item] * own[:, item]
            return out / total

        return tiled(of_rows, latents.contiguous(), scores.contiguous())

    def fold(self, state: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
        """As TorchOps.fold, token by token: one step of 128 tokens equals 128 steps of one."""
        plain = super().fold

        def of_rows(own: Tensor, raw: Tensor, mask: Tensor) -> Tensor:
            for item in range(raw.shape[1]):
                some = slice(item, item + 1)
                own = plain(own, raw[:, some].contiguous(), mask[:, some])
            return own

        return tiled(of_rows, state, rows, valid)

    def index_scores(self, q: Tensor, head_weights: Tensor, keys: AnyKeys) -> Tensor:
        """As TorchOps.index_scores, entries in tiles of 64."""
        plain, keys = super().index_scores, dense(keys, *q.shape[:2])

        def of_rows(own: Tensor, weights: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
            parts = _key_tiles(keys, rows, bias)
            return torch.cat([plain(own, weights, part) for part in parts], dim=-1)

        scores = tiled(of_rows, q, head_weights, keys.rows, keys.bias)
        return scores[..., : keys.rows.shape[1]]

    def route(
        self, x: Tensor, token_ids: Tensor, moe: MoeWeights, count: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """As TorchOps.route, in tiles."""
        plain = super().route

        def joined(rows: Tensor, tokens: Tensor) -> Tensor:
            ids, weights = plain(rows, tokens, moe, count, scaling)
            return torch.cat([ids.double(), weights.double()], dim=1)

        both = tiled(joined, x, token_ids)
        return both[:, :count].long(), both[:, count:].float()

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.expert_rows: every expert on every tile, unchosen ones with weight 0."""
        w13, w2 = moe.floats.w13, moe.floats.w2
        held = w13.shape[0]

        def of_rows(rows: Tensor, own_ids: Tensor, own_weights: Tensor) -> Tensor:
            known = torch.where((own_ids < 0) | (own_ids >= held), held, own_ids)
            spread = torch.zeros(rows.shape[0], held + 1, device=rows.device).scatter_(1, known, own_weights)
            every = rows.unsqueeze(0).expand(held, -1, -1)
            inner = torch.bmm(every, w13.transpose(1, 2))
            act = self.swiglu(inner, limit) * spread[:, :held].t().unsqueeze(2)
            out = F.pad(torch.bmm(act.to(rows.dtype), w2.transpose(1, 2)), (0, 0, 0, 0, 0, 1))
            return out[known, torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)]

        return tiled(of_rows, x, ids, weights)

    def sum_choices(self, rows: Tensor) -> Tensor:
        """As TorchOps.sum_choices, choice by choice."""
        return in_order(rows)

    def shared_expert(self, x: Rows, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.shared_expert, in tiles."""
        return self.linear(
            tiled(lambda rows: self.swiglu(rows, limit), self.linear(x, moe.shared_w13)), moe.shared_w2
        )


def _key_tiles(keys: Keys, rows: Tensor, bias: Tensor) -> list[Keys]:
    """Keys in tiles of 64 from the first, the last padded with masked ones; rows [n, N], bias [n, 1, N]."""
    padding = -rows.shape[1] % KEY_TILE
    rows, bias = F.pad(rows, (0, padding)), F.pad(bias, (0, padding), value=-torch.inf)
    pairs = zip(torch.split(rows, KEY_TILE, -1), torch.split(bias, KEY_TILE, -1), strict=True)
    return [Keys(keys.pool, own.contiguous(), own_bias.contiguous(), keys.scales) for own, own_bias in pairs]


def _attend_tiles(q: Tensor, parts: list[Keys], sink: Tensor) -> Tensor:
    """Online softmax over key tiles; q [n, 1, heads, D]."""
    n, _, heads, wide = q.shape
    q = (q.view(n, heads, wide) * wide**-0.5).contiguous()
    top = sink.view(1, heads, 1).expand(n, heads, 1).contiguous()
    total, out = torch.ones_like(top), torch.zeros_like(q, dtype=torch.float32)
    for part in parts:
        keys = read_latents(part.pool, part.rows.flatten(), q).view(n, -1, wide)
        scores = torch.bmm(q, keys.transpose(1, 2)).float() + part.bias
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        kept, weights = torch.exp(top - higher), torch.exp(scores - higher)
        total = total * kept + weights.sum(-1, keepdim=True)
        out = out * kept + torch.bmm(weights.to(q.dtype), keys)
        top = higher
    return (out / total).to(q.dtype).unsqueeze(1)
