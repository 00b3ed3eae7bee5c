"""How memory that ranks' kernels share is cut: where what lies, and how much of it a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from engine.model.quant import FP8_BLOCK

LINE = 128
"""Bytes between what is written by different ranks, and between planes."""


@dataclass(frozen=True)
class Planes:
    """The byte at which each plane begins, for steps of at most `rows` rows of each rank.

    Rows of all ranks, [P R] in rank order, have flags (at 0), codes, scales, ids and weights; then come a
    flag of each rank that is through with its products, a line apart, and the rows of this rank's choices
    [R k, H]. A step of fewer rows takes the first ones of each plane.
    """

    ranks: int
    rows: int
    hidden: int
    choices: int
    codes: int
    scales: int
    ids: int
    weights: int
    through: int
    back: int
    bytes: int


def planes(ranks: int, rows: int, hidden: int, choices: int) -> Planes:
    """The planes for these sizes; `hidden` is a multiple of 128."""
    sizes = _sizes(ranks, rows, hidden, choices)
    return Planes(ranks, rows, hidden, choices, *accumulate(-(-size // LINE) * LINE for size in sizes))


def _sizes(ranks: int, rows: int, hidden: int, choices: int) -> tuple[int, ...]:
    """Bytes of each plane; all but the ranks' flags are so many times those of one row."""
    every = ranks * rows
    return (
        8 * every, every * hidden, every * hidden // FP8_BLOCK * 4, every * choices * 4, every * choices * 4,
        ranks * LINE, rows * choices * hidden * 2,
    )  # fmt: skip


def rows_within(size: int, ranks: int, hidden: int, choices: int) -> int:
    """Rows of each rank for which a region of so many bytes has room."""
    row = sum(_sizes(ranks, 1, hidden, choices)) - ranks * LINE
    return max(0, (size - _between(ranks)) // row)


def bytes_for(ranks: int, rows: int, hidden: int, choices: int) -> int:
    """Of a region that has room for so many rows of each rank."""
    return planes(ranks, rows, hidden, choices).bytes + _between(ranks)


def _between(ranks: int) -> int:
    """The most that flags of ranks and the planes' ends take."""
    return (ranks + 6) * LINE
