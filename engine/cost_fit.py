"""Fits the table of what steps cost to measured cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.actors.capacity import CostTable, Curve
from engine.cost_cells import Measured

Floats = npt.NDArray[np.float64]

STRIDE = 1.25
"""Points of the curve of rows are at least this factor apart: closer ones would fit noise."""


def fit(measured: Sequence[Measured]) -> CostTable:
    """The table with the least squared relative errors, none of whose costs falls when a step grows.

    raises  ValueError where cells with drafts or without are missing
    """
    cells = [one.cell for one in measured]
    if {cell.drafted for cell in cells} != {False, True}:
        raise ValueError("a table needs cells with drafts and cells without")
    seconds = np.array([one.seconds for one in measured])
    requests = np.array([cell.requests for cell in cells])
    rows = np.array([cell.rows for cell in cells])
    drafted = np.array([cell.drafted for cell in cells])
    some, many = sorted(set(requests.tolist())), _apart(rows)
    least = drafted[:, None].astype(float)
    parts = [
        np.ones((len(cells), 1)),
        _rises(requests, some),
        _rises(rows, many),
        np.concatenate([least, least * _rises(requests, some)], axis=1),
    ]
    found = nonnegative_least_squares(np.concatenate(parts, axis=1) / seconds[:, None], np.ones(len(cells)))
    ends = np.cumsum([part.shape[1] for part in parts])
    bias, by_requests, by_rows, by_draft = np.split(found, ends[:-1])
    return CostTable(
        float(bias[0]),
        Curve(some, [0.0, *np.cumsum(by_requests)]),
        Curve(many, [0.0, *np.cumsum(by_rows)]),
        Curve(some, np.cumsum(by_draft).tolist()),
    )


def errors(table: CostTable, measured: Sequence[Measured]) -> Floats:
    """Relative errors of the table at the cells that it was fitted to."""
    told = [float(table.seconds(one.cell.requests, one.cell.rows, one.cell.drafted)) for one in measured]
    seconds = np.array([one.seconds for one in measured])
    relative: Floats = np.array(told) / seconds - 1.0
    return relative


def _apart(rows: npt.NDArray[np.int64]) -> list[int]:
    """Numbers of rows that are measured, thinned; the largest one stays."""
    distinct = sorted(set(rows.tolist()))
    kept = distinct[:1]
    for count in distinct[1:-1]:
        if count >= STRIDE * kept[-1] and distinct[-1] >= STRIDE * count:
            kept.append(count)
    return kept + distinct[1:][-1:]


def _rises(values: npt.NDArray[np.int64], at: Sequence[int]) -> Floats:
    """How much of each rise from one point to the next lies below each value: [values, points - 1]."""
    low, high = np.array(at[:-1]), np.array(at[1:])
    below: Floats = np.clip((values[:, None] - low) / (high - low), 0.0, 1.0)
    return below


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 with the least |matrix x - target|; Lawson and Hanson's active sets."""
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, bool)
    small = 1e-10 * float(np.abs(matrix.T @ target).max(initial=1e-300))
    for _ in range(10 * count):
        gain = np.where(free, -np.inf, matrix.T @ (target - matrix @ x))
        if gain.max() <= small:
            break
        free[int(gain.argmax())] = True
        while True:
            whole = np.zeros(count)
            whole[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            bad = free & (whole <= 0)
            if not bad.any():
                break
            with np.errstate(invalid="ignore"):
                step = np.nan_to_num(x[bad] / (x[bad] - whole[bad])).min()
            x = x + step * (whole - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = whole
    return x
