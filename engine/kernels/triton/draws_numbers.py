"""Numbers inside the sampling kernels: counter-based uniforms, tempered weights, places in cumulative sums.

Source: engine/runner/randomness.py, whose bits are these; engine/runner/tempering.py and filters.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from engine.kernels.triton.formats import INTERPRETED
from engine.runner.randomness import Purpose

GROUP = 128
"""Tokens that statistics of a row are kept for; a place is found by its group first, then inside it."""
SAMPLE = tl.constexpr(int(Purpose.SAMPLE))
DRAFT = tl.constexpr(int(Purpose.DRAFT))
ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))


@triton.jit
def _absorb(state, word):
    """One round of splitmix64's finaliser; uint64 both."""
    z = (state ^ word) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(key, position, word):
    """Uniform float64 inside (0, 1), on a grid of 2^-48.

    key, position  int64 of the same shape;  word  purpose | draw << 8, an integer
    """
    position = position.to(tl.int64)
    bits = _absorb(key.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True))
    bits = _absorb(bits, (tl.zeros_like(position) + word).to(tl.uint64, bitcast=True))
    # Below 2^48 int64 says the same, and every processor converts it.
    top = (bits >> 16).to(tl.int64, bitcast=True)
    return (top.to(tl.float64) + 0.5) * 3.552713678800501e-15


@triton.jit
def weight(logit, best, temperature):
    """exp((logit - best) / temperature) as torch rounds it on the same kind of device; float32."""
    turned = tl.div_rn(logit - best, temperature + tl.zeros_like(logit))
    if INTERPRETED:  # noqa: SIM108 (only one of the two exists)
        out = tl.exp(turned)
    else:
        out = libdevice.exp(turned)
    return out


@triton.jit
def key_of(weight):
    """Weights in [0, 1] as int32 of the same order, below 2^30."""
    return weight.to(tl.int32, bitcast=True)


@triton.jit
def weight_of(key):
    """The weight of a key."""
    return key.to(tl.float32, bitcast=True)


@triton.jit
def pick_group(mass, u, PLACES: tl.constexpr):
    """The group that a share u of all mass falls in, and the share of that group's own mass that is left.

    mass  float64 [PLACES], of tokens in ascending order;  u float64
    """
    place = tl.arange(0, PLACES)
    through = tl.cumsum(mass, 0)
    goal = u * tl.max(through, 0)
    some = mass > 0
    last = tl.max(tl.where(some, place, 0), 0)
    group = tl.minimum(tl.min(tl.where((through > goal) & some, place, PLACES), 0), last)
    before = tl.max(tl.where(place < group, through, 0.0), 0)
    own = tl.sum(tl.where(place == group, through, 0.0), 0) - before
    return group, (goal - before) / own


@triton.jit
def pick_inside(mass, share, SIZE: tl.constexpr):
    """The place that a share of all mass falls on; mass float64 [SIZE], not all 0, and share float64."""
    place = tl.arange(0, SIZE)
    through = tl.cumsum(mass, 0)
    total = tl.max(through, 0)
    # The two sums may differ in their last bits: a share of 1 would fall behind the last token.
    goal = tl.minimum(tl.maximum(share, 0.0) * total, total - total * 9.094947017729282e-13)
    some = mass > 0
    last = tl.max(tl.where(some, place, 0), 0)
    return tl.minimum(tl.min(tl.where((through > goal) & some, place, SIZE), 0), last)
