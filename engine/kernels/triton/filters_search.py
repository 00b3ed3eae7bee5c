"""Cuts of a row and places in its ranking where many tokens stay or tie: a search by the weights' bits.

Each pass counts, or weighs, tokens at eight thresholds, and so finds three bits of the one looked for: passes
over a list of some thousand tokens, or, where more may stay, over the whole row. Exact for any row, and slow.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.draws_numbers import key_of, weight, weight_of

STEPS = tl.constexpr(10)
"""Three bits of thirty each."""
NOBODY = tl.constexpr(1 << 30)


@triton.jit
def kth_key(keys, k):
    """The largest key that at least k of `keys` int32 [N] reach; 0 where fewer than k are 0 or more."""
    j = tl.arange(0, 8)
    low = tl.zeros((), tl.int32)
    for step in range(STEPS):
        threshold = low + (j << (27 - 3 * step))
        reached = tl.sum((keys[:, None] >= threshold[None, :]).to(tl.int32), 0) >= k
        low = tl.max(tl.where(reached | (j == 0), threshold, low), 0)
    return low


@triton.jit
def _keys(row, ids, first, count, best, temperature, LISTED: tl.constexpr, WIDE: tl.constexpr):
    """Tokens at places first .. first + WIDE - 1 and their keys; -1 behind the last.

    row, ids  float32 and int32 [count] in memory: the logits of all tokens, or (LISTED) weights of some
    """
    token = first + tl.arange(0, WIDE)
    held = token < count
    if LISTED:
        own = tl.load(row + token, mask=held, other=0.0)
        token = tl.load(ids + token, mask=held, other=0)
    else:
        own = weight(tl.load(row + token, mask=held, other=float("-inf")), best, temperature)
    return token, tl.where(held, key_of(own), -1)


@triton.jit
def _crossing(
    row, ids, count, best, temperature, goal, by_mass, beyond, LISTED: tl.constexpr, WIDE: tl.constexpr
):
    """The largest key that tokens from the best down to it reach the goal with; 0 if with none.

    by_mass  whether their mass is meant, or their number;  beyond  whether it must be exceeded
    """
    j = tl.arange(0, 8)
    low = tl.zeros((), tl.int32)
    for step in range(STEPS):
        threshold = low + (j << (27 - 3 * step))
        total = tl.zeros((WIDE, 8), tl.float64)
        for first in tl.range(0, count, WIDE, num_stages=2):
            _, key = _keys(row, ids, first, count, best, temperature, LISTED, WIDE)
            own = tl.where(by_mass, weight_of(tl.maximum(key, 0)), 1.0).to(tl.float64)
            total += tl.where(key[:, None] >= threshold[None, :], own[:, None], 0.0)
        found = tl.sum(total, 0)
        reached = tl.where(beyond, (found > goal).to(tl.int32), (found >= goal).to(tl.int32))
        low = tl.max(tl.where((reached > 0) | (j == 0), threshold, low), 0)
    return low


@triton.jit
def _tally(row, ids, count, best, temperature, key, LISTED: tl.constexpr, WIDE: tl.constexpr):
    """Tokens with a larger key, int32, their mass, float64, and tokens with this key, int32."""
    more = tl.zeros((WIDE,), tl.int32)
    held = tl.zeros((WIDE,), tl.int32)
    mass = tl.zeros((WIDE,), tl.float64)
    for first in tl.range(0, count, WIDE, num_stages=2):
        _, own = _keys(row, ids, first, count, best, temperature, LISTED, WIDE)
        more += (own > key).to(tl.int32)
        held += (own == tl.maximum(key, 0)).to(tl.int32)
        mass += tl.where(own > key, weight_of(tl.maximum(own, 0)), 0.0).to(tl.float64)
    return tl.sum(more, 0), tl.sum(mass, 0), tl.sum(held, 0)


@triton.jit
def _tokens_at(
    row, ids, count, best, temperature, key, n, other_key, m, LISTED: tl.constexpr, WIDE: tl.constexpr
):
    """Tokens that have a key and n such before them, and another and m; NOBODY if there is none."""
    seen, other_seen = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    token, other_token = tl.full((), NOBODY, tl.int32), tl.full((), NOBODY, tl.int32)
    for first in tl.range(0, count, WIDE, num_stages=2):
        at, own = _keys(row, ids, first, count, best, temperature, LISTED, WIDE)
        equal, other = (own == key).to(tl.int32), (own == other_key).to(tl.int32)
        before, other_before = seen + tl.cumsum(equal, 0), other_seen + tl.cumsum(other, 0)
        token = tl.minimum(token, tl.min(tl.where((equal > 0) & (before == n + 1), at, NOBODY), 0))
        hit = (other > 0) & (other_before == m + 1)
        other_token = tl.minimum(other_token, tl.min(tl.where(hit, at, NOBODY), 0))
        seen += tl.sum(equal, 0)
        other_seen += tl.sum(other, 0)
    return token, other_token


@triton.jit
def mass_of(weights, count, WIDE: tl.constexpr):
    """Sum of float32 [count] in memory, float64."""
    total = tl.zeros((WIDE,), tl.float64)
    for first in tl.range(0, count, WIDE, num_stages=2):
        at = first + tl.arange(0, WIDE)
        total += tl.load(weights + at, mask=at < count, other=0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def search(
    row, ids, count, best, temperature, top_k, top_p, min_p, total, u,
    LISTED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(Last key that stays, last token with it that stays, mass that stays, token drawn) of a row.

    row, ids, count  as of `_keys`: what may stay must be listed
    top_k int32, top_p and min_p float32; total float64, the mass of the row, and u float64
    """
    floor, ties, kept = tl.full((), -1, tl.int32), tl.zeros((), tl.int32), total
    key, place = floor, ties
    # Top-k, top-p, what stays of both and min-p, the draw: each looks for a key and counts what is there.
    for stage in range(4):
        goal = tl.where(stage == 1, tl.maximum(top_p.to(tl.float64) * kept, 1e-30), u * kept)
        goal = tl.where(stage == 0, top_k.to(tl.float64), goal)
        asked = tl.where(stage == 0, top_k > 0, tl.where(stage == 1, top_p < 1.0, stage >= 2))
        if (stage == 2) & (min_p > 0) & (floor < key_of(min_p)):
            floor, ties = key_of(min_p) - 1, tl.zeros((), tl.int32)
        if asked:
            key = floor
            if stage != 2:
                key = _crossing(row, ids, count, best, temperature, goal, stage > 0, stage == 3, LISTED, WIDE)
                key = tl.where(stage == 3, tl.maximum(key, floor), key)
            more, mass, held = _tally(row, ids, count, best, temperature, key, LISTED, WIDE)
            own = weight_of(tl.maximum(key, 0)).to(tl.float64)
            some = tl.minimum((goal - mass) / tl.maximum(own, 1e-37), 1e9)
            if stage == 1:
                # One token stays even of a share of nothing.
                share = tl.maximum(tl.ceil(some).to(tl.int32), 1)
                share = tl.where(key == floor, tl.minimum(ties, share), share)
                floor, ties = tl.maximum(key, floor), tl.where(key >= floor, share, ties)
            elif stage < 3:
                floor, ties = key, tl.where(stage == 0, top_k - more, tl.minimum(ties, held))
                kept = mass + ties.to(tl.float64) * own
            else:
                most = tl.where(key == floor, ties, held) - 1
                place = tl.maximum(tl.minimum(tl.floor(some).to(tl.int32), most), 0)
    token, last = _tokens_at(row, ids, count, best, temperature, key, place, floor, ties - 1, LISTED, WIDE)
    return floor, tl.where(ties > 0, last, -1), kept, token
