"""Draws from a row's tempered distribution, whole or cut by top-k, top-p and min-p.

Tokens are ranked by weight, equal weights by token id, lowest first. A draw is a pure function of the row and
its number u: neither the other rows nor how a sort orders equal weights can change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import cpu_masks
from engine.runner.edits import MaskWords

_BLOCK = 128
# Lengths of the sorted prefix that are tried: the kept set of most rows is short, and a sort of 8192 values
# costs 0.5 ms where the 128 best of them cost 35 us.
_PREFIXES = (128, 1024)


def greatest(logits: Tensor, mask: MaskWords | None = None) -> tuple[Tensor, Tensor]:
    """Largest logit of each row, float32 [n], and the first token that has it, int64 [n]; NaN is largest.

    mask  rows that have one choose among what it allows; logits stay as they are
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1:
        if mask is None:
            return cpu_masks.greatest(logits)
        return cpu_masks.greatest(logits, torch.from_numpy(mask.rows), mask.words)
    if mask is not None:
        logits = logits.clone()
        mask(logits)
    best, tokens = logits.max(-1)
    return best, tokens


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 [n], each with probability proportional to its weight; a token of weight 0 is never drawn.

    weights  float32 [n, V], the largest of each row is 1
    u        float64 [n], inside (0, 1)
    """
    rows, vocab_size = weights.shape
    missing = -vocab_size % _BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).view(rows, -1, _BLOCK)
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    block = _first_above(cumulative, u * cumulative[:, -1])
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_min(0)), 0.0)
    share = (u[:, None] * cumulative[:, -1:] - before) / (cumulative.gather(-1, block) - before)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    # The two sums may differ in their last bits: a share of 1 would fall behind the block's last token.
    found = _first_above(inside, share[:, 0].clamp(0.0, 1.0 - 2.0**-40) * inside[:, -1])
    return (block * _BLOCK + found)[:, 0].clamp_max(vocab_size - 1)


def draw_filtered(
    weights: Tensor, u: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, largest_k: int
) -> Tensor:
    """As `draw`, from the tokens that top-k, then top-p, then min-p keep; the best token is always kept.

    top_k      int64 [n], 0 off;  top_p float32 [n], 1 off;  min_p float32 [n], 0 off
    largest_k  largest top_k of the rows, known to the host
    """
    tokens = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    for r in _ranked(weights, top_k, top_p, min_p, largest_k):
        tokens[r.rows] = _pick(r.weights, r.best, r.ids, r.kept, u[r.rows])
    return tokens


def cut(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, largest_k: int) -> Tensor:
    """Set weights that `draw_filtered` would drop to 0, in place; the sum of the others, float64 [n]."""
    totals = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
    least = torch.zeros(len(weights), 1, device=weights.device)
    ties = torch.zeros(len(weights), 1, dtype=torch.int64, device=weights.device)
    for r in _ranked(weights, top_k, top_p, min_p, largest_k):
        last = r.kept[:, None] - 1
        floor = r.best.gather(-1, last)
        totals[r.rows] = r.best.cumsum(-1, dtype=torch.float64).gather(-1, last)[:, 0]
        least[r.rows] = floor
        ties[r.rows] = last + 1 - (r.best > floor).sum(-1, keepdim=True)
    equals = weights == least
    if weights.is_cuda or bool((equals.sum(-1, keepdim=True) > ties).any()):
        weights.masked_fill_(equals & (equals.cumsum(-1) > ties), 0.0)
    weights.masked_fill_(weights < least, 0.0)
    return totals


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Best weights of some rows.

    rows     int64 [m], their places in the call
    weights  float32 [m, V]
    best     float32 [m, K] descending, ids int64 [m, K]
    kept     int64 [m], how many ranks stay
    """

    rows: Tensor
    weights: Tensor
    best: Tensor
    ids: Tensor
    kept: Tensor


def _ranked(
    weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, largest_k: int
) -> Iterator[_Ranked]:
    """The rows ranked, first all by a short prefix; rows come again where more than that may stay."""
    vocab_size = weights.shape[-1]
    left = torch.arange(len(weights), device=weights.device)
    some = weights
    for prefix in (*_PREFIXES, vocab_size):
        if prefix < vocab_size and (largest_k > prefix or weights.is_cuda):
            continue
        best = some.topk(min(prefix, vocab_size), -1)
        kept = _kept(best.values, some, top_k[left], top_p[left], min_p[left])
        yield _Ranked(left, some, best.values, best.indices, kept)
        is_open = (kept == prefix) & (top_k[left] == 0) & (prefix < vocab_size)
        if prefix >= vocab_size or not bool(is_open.any()):
            break
        left = left[is_open]
        some = weights[left]


def _kept(best: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """How many of the ranked weights `best` [n, K] stay, at least 1; K where more than the prefix may."""
    limit = torch.where(top_k > 0, top_k, best.shape[-1]).clamp_max(best.shape[-1])
    cumulative = best.cumsum(-1, dtype=torch.float64)
    # Top-p is a share of what top-k left.
    total = weights.sum(-1, dtype=torch.float64)
    whole = torch.where(top_k > 0, cumulative.gather(-1, limit[:, None] - 1)[:, 0], total)
    below = torch.where(top_p < 1.0, top_p.to(torch.float64) * whole, float("inf"))
    in_nucleus = torch.searchsorted(cumulative, below[:, None])[:, 0] + 1
    likely = (best >= min_p[:, None]).sum(-1)
    return torch.minimum(torch.minimum(limit, in_nucleus), likely).clamp_min(1)


def _pick(weights: Tensor, best: Tensor, ids: Tensor, kept: Tensor, u: Tensor) -> Tensor:
    """Draw one of the first `kept` ranks of each row, and give its token."""
    cumulative = best.cumsum(-1, dtype=torch.float64)
    rank = _first_above(cumulative, u * cumulative.gather(-1, kept[:, None] - 1)[:, 0])
    rank = torch.minimum(rank, kept[:, None] - 1)
    value = best.gather(-1, rank)
    equals = (best == value).sum(-1, keepdim=True)
    tokens = ids.gather(-1, rank)
    # The prefix may end within a run of equal weights, so its last rank counts as tied.
    tied = (equals > 1) | (rank == best.shape[-1] - 1)
    if bool(tied.any()):
        place = rank - (best > value).sum(-1, keepdim=True)
        among = (weights == value).cumsum(-1)
        by_id = _first_above(among, place[:, 0])
        tokens = torch.where(tied, by_id.clamp_max(weights.shape[-1] - 1), tokens)
    return tokens[:, 0]


def _first_above(ascending: Tensor, value: Tensor) -> Tensor:
    """First index of each row [n, K] whose entry exceeds the row's value, int64 [n, 1]; K - 1 if none."""
    found = torch.searchsorted(ascending, value[:, None], right=True)
    return found.clamp_max(ascending.shape[-1] - 1)
