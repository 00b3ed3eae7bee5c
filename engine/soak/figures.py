"""Small statistics of the report."""

from __future__ import annotations

from collections.abc import Sequence

HOUR_S = 3600.0


def slope_per_hour(times_s: Sequence[float], values: Sequence[float]) -> float | None:
    """Least-squares slope of values over times, an hour; None for fewer than three points or one moment."""
    count = len(times_s)
    if count < 3:
        return None
    middle, level = sum(times_s) / count, sum(values) / count
    spread = sum((time_s - middle) ** 2 for time_s in times_s)
    if not spread:
        return None
    together = sum((time_s - middle) * (value - level) for time_s, value in zip(times_s, values, strict=True))
    return together / spread * HOUR_S


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile; 0 for no values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -int(-len(ranked) * share // 1) - 1))]
