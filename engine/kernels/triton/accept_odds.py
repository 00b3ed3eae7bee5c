"""The odds of drafts: u q(d) < p(d), with p the target's distribution after all filters and q the draft's.

Source: engine/runner/acceptance_odds.py (`test`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.draws_numbers import key_of, weight


@triton.jit
def draft_odds(
    draft_logits, tops, sums, row, cell, judges, columns, places, temperature,
    LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Of draft rows: the largest logit, the mass (1 of none), and a token's weight; all [LANES]."""
    place = tl.arange(0, PLACES)
    held = judges[:, None] & (place < places)[None, :]
    at = row.to(tl.int64)[:, None] * places + place[None, :]
    top = tl.load(tops + at, mask=held, other=float("-inf"))
    best = tl.max(top, 1)
    best = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    mass = tl.load(sums + at, mask=held, other=0.0) * weight(top, best[:, None], temperature).to(tl.float64)
    value = tl.load(draft_logits + row.to(tl.int64) * columns + cell, mask=judges, other=float("-inf"))
    mass = tl.sum(mass, 1)
    return best, tl.where(mass > 0, mass, 1.0), weight(value, best, temperature)


@triton.jit
def target_odds(logits, bests, totals, floors, lasts, row, cell, tested, stride, temperature):
    """p of the tokens `cell` in rows of the target, float64 [LANES]; where none is tested, anything."""
    best = tl.load(bests + row, mask=tested, other=0.0)
    finite = tested & (tl.abs(best) < float("inf"))
    value = tl.load(logits + row.to(tl.int64) * stride + cell, mask=tested, other=float("-inf"))
    own = weight(value, tl.where(finite, best, 0.0), temperature)
    key, floor = key_of(own), tl.load(floors + row, mask=tested, other=0)
    kept = (key > floor) | ((key == floor) & (cell <= tl.load(lasts + row, mask=tested, other=0)))
    return tl.where(kept, own, 0.0).to(tl.float64) / tl.load(totals + row, mask=finite, other=1.0)
