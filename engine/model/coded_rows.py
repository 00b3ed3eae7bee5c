"""Inputs of products that a kernel has rounded to FP8 where it made them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CodedRows:
    """Values [T, K], and what a product with FP8 weights takes in their place.

    codes   float8_e4m3fn [T, K]
    scales  float32 [T, K / 128], powers of two
    """

    values: Tensor
    codes: Tensor
    scales: Tensor


Rows = Tensor | CodedRows
"""Inputs of a product: a kernel set that takes no codes makes none."""


def values_of(rows: Rows) -> Tensor:
    """The values [T, K]."""
    return rows.values if isinstance(rows, CodedRows) else rows
