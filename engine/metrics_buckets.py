"""Histograms as they travel from ranks: plain figures with the keys that an exposition has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

NO_LABELS: Mapping[str, str] = {}


def key_of(name: str, labels: Mapping[str, str] = NO_LABELS) -> str:
    """A figure's name with its labels, in their order: `name{a="x",b="y"}`."""
    inner = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inner}}}" if inner else name


def le_of(bound: float) -> str:
    """A bucket's upper bound as Prometheus writes it."""
    return "+Inf" if bound == float("inf") else repr(float(bound))


def keys_of(name: str, bounds: Sequence[float], labels: Mapping[str, str] = NO_LABELS) -> list[str]:
    """Keys of a histogram: of every bucket, the one without a bound last, then of the sum."""
    ends = [*bounds, float("inf")]
    buckets = [key_of(name + "_bucket", {**labels, "le": le_of(bound)}) for bound in ends]
    return [*buckets, key_of(name + "_sum", labels)]


def figures_of(keys: Sequence[str], counts: Sequence[int], total: float) -> dict[str, float]:
    """Figures of a histogram: `counts` of single buckets become those of all up to a bound.

    keys  of `keys_of`
    """
    return dict(zip(keys, [*accumulate(counts), total], strict=True))


class Buckets:
    """One histogram: counts of what is at most each bound, and the sum.

    bounds  ascending
    """

    def __init__(self, name: str, bounds: Sequence[float], labels: Mapping[str, str] = NO_LABELS) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._bounds = tuple(bounds)
        self._keys = keys_of(name, bounds, labels)

    def observe(self, value: float) -> None:
        """Counts one."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def figures(self) -> dict[str, float]:
        """As `figures_of`."""
        return figures_of(self._keys, self.counts, self.total)
