"""Top-k, top-p and min-p of one row by the few tokens that can stay, and a draw from what stays.

The k-th largest of the groups' largest weights has at least k tokens at or above it, and only its own group
and larger ones can hold them: of a usual row some hundred tokens are looked at. They are ranked by counting
for each how many are better, so that nothing is sorted. A row of which more may stay is searched.

Source: engine/runner/filters.py (`draw_filtered`, `cut`): ranked by weight, ties by the smaller token.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.draws_numbers import key_of, weight
from engine.kernels.triton.filters_search import kth_key, mass_of, search

CANDIDATES = tl.constexpr(512)
"""Tokens that are ranked by counting, at most."""
LISTED = tl.constexpr(8192)
"""Tokens that are searched as a list, at most."""
SCAN = tl.constexpr(2048)
RANKED = tl.constexpr(4)
"""Rivals that each token is compared with at once: more would take the registers of a second program."""
SEARCHED = tl.constexpr(-2)


@triton.jit
def least_key(heads, top_k, top_p, min_p, count, share):
    """The least key to look at, and whether all that may stay have such keys.

    heads  int32 [N], the largest key of each of `count` groups; -1 elsewhere
    share  how many groups a share of all mass is looked for in
    """
    wanted = tl.minimum(tl.where(top_k > 0, top_k, share), count)
    key = kth_key(heads, wanted)
    likely = key_of(min_p)
    if top_p >= 1.0:
        # Nothing below min-p stays, and no share of what top-k leaves is asked for.
        key = tl.where(top_k > 0, tl.maximum(key, likely), likely)
    elif top_k == 0:
        key = tl.maximum(key, likely)
    return key, ((key == likely) & ((top_k == 0) | (top_p >= 1.0))) | (key == 0)


@triton.jit
def collect(
    row, groups, columns, best, temperature, key, hits, ids, weights,
    SIZE: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes tokens of at least this key, ascending, and their weights; returns how many there are.

    groups        int32 [hits] in memory, those that hold such tokens
    ids, weights  int32 and float32 [MOST] in memory; what is beyond isn't written
    """
    lane = tl.arange(0, WIDE)
    count = tl.zeros((), tl.int32)
    for first in tl.range(0, hits, WIDE // SIZE, num_stages=2):
        place = first + lane // SIZE
        group = tl.load(groups + place, mask=place < hits, other=0)
        token = group * SIZE + lane % SIZE
        held = (place < hits) & (token < columns)
        value = tl.load(row + token, mask=held, other=float("-inf"))
        own = weight(value, best, temperature)
        found = (held & (key_of(own) >= key)).to(tl.int32)
        at = count + tl.cumsum(found, 0) - found
        tl.store(ids + at, token, mask=(found > 0) & (at < MOST))
        tl.store(weights + at, own, mask=(found > 0) & (at < MOST))
        count += tl.sum(found, 0)
    return count


@triton.jit
def candidates(
    row, heads, listed, ids, weights, columns, best, temperature, key,
    PLACES: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """As `collect`, from the groups whose largest key, of heads int32 [PLACES], reaches this one."""
    hit = (heads >= key).to(tl.int32)
    tl.store(listed + tl.cumsum(hit, 0) - hit, tl.arange(0, PLACES), mask=hit > 0)
    tl.debug_barrier()
    hits = tl.sum(hit, 0)
    found = collect(row, listed, columns, best, temperature, key, hits, ids, weights, SIZE, MOST, SCAN)
    tl.debug_barrier()
    return found


@triton.jit
def rank(ids, weights, count, MOST: tl.constexpr, STEP: tl.constexpr):
    """Of each of `count` tokens: id and weight (-1 beyond), how many are better, and the mass of those."""
    i = tl.arange(0, MOST)
    token = tl.load(ids + i, mask=i < count, other=0)
    own = tl.load(weights + i, mask=i < count, other=-1.0)
    better = tl.zeros((MOST, STEP), tl.int32)
    mass = tl.zeros((MOST, STEP), tl.float64)
    for first in range(0, count, STEP):
        j = first + tl.arange(0, STEP)
        other = tl.load(weights + j, mask=j < count, other=-2.0)
        rival = tl.load(ids + j, mask=j < count, other=0)
        tied = (other[None, :] == own[:, None]) & (rival[None, :] < token[:, None])
        ahead = (other[None, :] > own[:, None]) | tied
        better += ahead.to(tl.int32)
        mass += tl.where(ahead, other[None, :], 0.0).to(tl.float64)
    return token, own, tl.sum(better, 1), tl.sum(mass, 1)


@triton.jit
def cut_ranked(token, own, better, before, count, top_k, top_p, min_p, total, u, MOST: tl.constexpr):
    """Cut and draw among ranked tokens; `total` is the mass of the row.

    returns  (last key that stays, last token with it that stays, mass that stays, token drawn,
             whether top-p's share lies within these tokens)
    """
    real = tl.arange(0, MOST) < count
    in_k = real & (better < tl.where(top_k > 0, top_k, MOST))
    heavy = tl.where(real, own, 0.0).to(tl.float64)
    whole = total
    if top_k > 0:
        whole = tl.sum(tl.where(in_k, heavy, 0.0), 0)
    goal = tl.where(top_p < 1.0, top_p.to(tl.float64) * whole, float("inf"))
    kept = (in_k & (before < goal) & (own >= min_p)) | (real & (better == 0))
    mass = tl.sum(tl.where(kept, heavy, 0.0), 0)
    drawn = tl.max(tl.where(kept & (before <= u * mass), better, 0), 0)
    choice = tl.sum(tl.where(real & (better == drawn), token, 0), 0)
    floor = tl.min(tl.where(kept, key_of(own), 1 << 30), 0)
    last = tl.max(tl.where(kept & (key_of(own) == floor), token, -1), 0)
    return floor, last, mass, choice, tl.sum(heavy, 0) >= goal


@triton.jit
def filtered(
    row, heads, listed, ids, weights, columns, best, temperature, top_k, top_p, min_p, total, u, count,
    PLACES: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """(Last key that stays, last token with it, mass that stays, token drawn) of one row.

    The key is SEARCHED, and the mass the whole row's, where more may stay than are ranked here.

    heads                 int32 [PLACES], the largest key of each of `count` groups; -1 elsewhere
    listed, ids, weights  memory for int32 [PLACES], int32 [MOST], float32 [MOST]
    """
    key, whole = least_key(heads, top_k, top_p, min_p, count, tl.cdiv(count, 4))
    found = tl.sum((heads >= key).to(tl.int32), 0)
    floor = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float64)
    token = tl.zeros((), tl.int32)
    if found <= MOST:
        found = candidates(
            row, heads, listed, ids, weights, columns, best, temperature, key, PLACES, SIZE, MOST
        )
        if found <= MOST:
            t, own, better, before = rank(ids, weights, found, MOST, RANKED)
            floor, last, mass, token, enough = cut_ranked(
                t, own, better, before, found, top_k, top_p, min_p, total, u, MOST
            )
            whole = whole | tl.where(top_k > 0, found >= top_k, enough)
    if (found > MOST) | (whole == 0):
        floor, mass = tl.full((), SEARCHED, tl.int32), total
    return floor, last, mass, token


@triton.jit
def searched(
    row, heads, listed, ids, weights, columns, best, temperature, top_k, top_p, min_p, total, u, count,
    PLACES: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """As `filtered`, by a search of the tokens that nearly all groups have at or above one key, or of all."""
    key, whole = least_key(heads, top_k, top_p, min_p, count, count - count // 32)
    found = candidates(row, heads, listed, ids, weights, columns, best, temperature, key, PLACES, SIZE, MOST)
    share = tl.where(top_p < 1.0, top_p.to(tl.float64) * total, float("inf"))
    enough = tl.where(top_k > 0, found >= top_k, mass_of(weights, tl.minimum(found, MOST), SCAN) >= share)
    if (found <= MOST) & (whole | enough):
        floor, last, mass, token = search(
            weights, ids, found, best, temperature, top_k, top_p, min_p, total, u, True, SCAN // 2
        )
    else:
        floor, last, mass, token = search(
            row, ids, columns, best, temperature, top_k, top_p, min_p, total, u, False, SCAN // 2
        )
    return floor, tl.minimum(last, columns - 1), mass, tl.minimum(token, columns - 1)
