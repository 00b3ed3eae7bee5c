"""A batch unrolled to rows on the host, and the way of host columns to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.runner.batch import ForwardBatch

Int = npt.NDArray[np.int64]

# Row counts that are processed together: single rows, verify rows, chunks.
WIDTHS = (1, 8, 128)


@dataclass(frozen=True)
class RowColumns:
    """A batch unrolled to rows, host side; all int64 [T] but the request columns [B].

    slots, starts, counts, first_rows  request columns
    request     the row's request; padded rows belong to request -1
    row_slots   the row's slot; 0 for padded rows
    position    0 for padded rows
    """

    slots: Int
    starts: Int
    counts: Int
    first_rows: Int
    request: Int
    row_slots: Int
    position: Int


class Upload:
    """Moves host columns to the device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tensor(self, column: npt.NDArray[np.generic]) -> Tensor:
        """The column as it is; on the CPU it shares memory with `column`."""
        tensor = torch.from_numpy(column if column.flags.c_contiguous else np.ascontiguousarray(column))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def int64(self, column: npt.NDArray[np.integer]) -> Tensor:
        """The column as int64."""
        return self.tensor(column if column.dtype == np.int64 else column.astype(np.int64))


def padded(column: Int, size: int) -> Int:
    """The column [n] with zeros behind it, [size]."""
    out = np.zeros(size, column.dtype)
    out[: column.size] = column
    return out


def unroll(batch: ForwardBatch) -> RowColumns:
    """Row columns of a batch, padded rows last."""
    counts, starts, slots = (c.astype(np.int64) for c in (batch.counts, batch.starts, batch.slots))
    padding = batch.load.padded_tokens - batch.load.live_tokens
    if padding == 0 and counts.size == batch.tokens.size:
        rows = np.arange(counts.size)
        return RowColumns(slots, starts, counts, rows, rows, slots, starts)
    first_rows = np.cumsum(counts) - counts
    request = np.repeat(np.arange(counts.size), counts)
    position = np.arange(request.size) + (starts - first_rows)[request]
    return RowColumns(
        slots,
        starts,
        counts,
        first_rows,
        np.concatenate([request, np.full(padding, -1)]),
        np.concatenate([slots[request], np.zeros(padding, dtype=np.int64)]),
        np.concatenate([position, np.zeros(padding, dtype=np.int64)]),
    )


def by_width(counts: Int) -> list[tuple[Int, int]]:
    """Places of `counts` by width class, with each class's widest count, at most 128."""
    if counts.max(initial=0) == 1:
        return [(np.arange(counts.size), 1)]
    low, out = 0, []
    for width in WIDTHS:
        chosen = np.flatnonzero((counts > low) & ((counts <= width) | (width == WIDTHS[-1])))
        if chosen.size:
            out.append((chosen, min(int(counts[chosen].max()), width)))
        low = width
    return out
