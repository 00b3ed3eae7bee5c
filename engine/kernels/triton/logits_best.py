"""Log probabilities of a row's token and of its best ones: two passes, the second over single groups.

Source: engine/runner/logprobs.py; of equal logits the smaller token comes first.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.draws_numbers import GROUP, weight
from engine.kernels.triton.logits import group_stats


@triton.jit(do_not_specialize=["most"])
def _best(
    logits, chosen, tops, sums, logprobs, ids, values, stride, columns, groups, most,
    PLACES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    top = tl.load(tops + row * groups + place, mask=place < groups, other=float("-inf"))
    mass = tl.load(sums + row * groups + place, mask=place < groups, other=0.0)
    best = tl.max(top, 0)
    total = tl.sum(mass * weight(top, best, tl.full((), 1.0, tl.float32)).to(tl.float64), 0)
    normaliser = (best.to(tl.float64) + tl.log(total)).to(tl.float32)
    own = logits + row * stride
    token = tl.load(chosen + row)
    tl.store(logprobs + row, tl.load(own + token) - normaliser)
    last, last_id = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for i in range(most):
        group = tl.min(tl.where(top == tl.max(top, 0), place, PLACES - 1), 0)
        lane = group * SIZE + tl.arange(0, SIZE)
        value = tl.load(own + lane, mask=lane < columns, other=float("-inf"))
        # What was told already stands before the last one told, in the order of ranks.
        left = (value < last) | ((value == last) & (lane > last_id))
        value = tl.where(left, value, float("-inf"))
        last = tl.max(value, 0)
        last_id = tl.min(tl.where(left & (value == last), lane, columns - 1), 0)
        tl.store(ids + row * most + i, last_id.to(tl.int64))
        tl.store(values + row * most + i, last - normaliser)
        rest = tl.max(tl.where(lane == last_id, float("-inf"), value), 0)
        top = tl.where(place == group, rest, top)


def best_logprobs(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(Log probability of each row's token [n], ids [n, most] of its best ones, log probabilities of those).

    logits  float32 [n, V], finite, as the model gave them
    tokens  int64 [n], inside the vocabulary
    most    0 .. V: time grows with it
    returns float32, int64, float32
    raises  ShapeMismatch
    """
    rows, columns = logits.shape
    if tokens.shape != (rows,) or not 0 <= most <= columns:
        raise ShapeMismatch(f"{rows} rows, {tuple(tokens.shape)} tokens; the {most} best of {columns}")
    stats, empty = group_stats(logits), logits.new_empty
    logprobs, ids, values = empty(rows), empty(rows, most, dtype=torch.int64), empty(rows, most)
    groups = stats.tops.shape[1]
    if rows:
        _best[(rows,)](
            logits, tokens, stats.tops, stats.sums, logprobs, ids, values, logits.stride(0), columns, groups,
            most, triton.next_power_of_2(groups), GROUP,
        )  # fmt: skip
    return logprobs, ids, values
