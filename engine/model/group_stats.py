"""What is known of rows of logits before single tokens are looked at: figures of groups of 128 tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupStats:
    """Of R rows, in G = ceil(V / 128) groups.

    tops  float32 [R, G], the largest logit; NaN counts as infinity
    args  int32 [R, G], the first token that has it
    sums  float64 [R, G], sum of exp((logit - top) / temperature); of greedy rows, anything
    """

    tops: Tensor
    args: Tensor
    sums: Tensor
