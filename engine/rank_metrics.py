"""Series of ranks, from snapshots: gauges are set, counters and histograms grow by what was added since.

A rank's process counts from 0; the series here go on over its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.config import PAGE_TOKENS
from engine.messages import Snapshot
from engine.metrics_buckets import NO_LABELS, key_of, keys_of, le_of
from engine.metrics_tables import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    NATIVE_COUNTERS,
    NATIVE_HISTOGRAMS,
    RANK_LABELS,
    Series,
)

__all__ = ["COUNTERS", "FIGURE", "GAUGES", "HISTOGRAMS", "LABELS", "RankMetrics", "buckets_of"]

LABELS = RANK_LABELS

FIGURE = re.compile(
    r'(?P<name>\w+)(?:\{(?P<label>\w+)="(?P<value>[\w.+-]+)"(?:,(?P<label2>\w+)="(?P<value2>[\w.+-]+)")?\})?'
)
"""A key of Snapshot.counters: a name, perhaps with one or two labels."""


class RankMetrics(Collector):
    """Series of every rank in this registry; all label combinations exist from the start.

    context_length  tokens; the same on every rank
    native          the ranks' exchange is the native one
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str,
        model_name: str,
        ranks: int,
        context_length: int,
        native: bool = False,
    ) -> None:
        self.counters = COUNTERS | (NATIVE_COUNTERS if native else {})
        self.histograms = HISTOGRAMS | (NATIVE_HISTOGRAMS if native else {})
        self._prefix = prefix
        self._labels = [[model_name, "unified", str(rank), "0", "0", "0"] for rank in range(ranks)]
        self._values = [self._zeros(context_length) for _ in range(ranks)]
        self._counted: list[dict[str, float]] = [{} for _ in range(ranks)]
        # Of these figures a snapshot has the total, not the value.
        self._growing = {
            key for name, series in self.counters.items() for key in _plain_keys(name, series)
        } | {key for name, series in self.histograms.items() for key in _bucket_keys(name, series)}
        # Made once: a scrape reads each of these keys.
        self._layout = {
            name: [(own, keys_of(name, series.bounds, own)) for own in series.combinations()]
            for name, series in self.histograms.items()
        }
        registry.register(self)

    def _zeros(self, context_length: int) -> dict[str, float]:
        plain = GAUGES | self.counters
        zeros = {key: 0.0 for name, series in plain.items() for key in _plain_keys(name, series)}
        for name, series in self.histograms.items():
            zeros |= dict.fromkeys(_bucket_keys(name, series), 0.0)
        return zeros | {"page_size": PAGE_TOKENS, "context_len": context_length}

    @property
    def ranks(self) -> int:
        """How many."""
        return len(self._values)

    def value(self, rank: int, key: str) -> float:
        """A figure of a rank by its key, as in Snapshot.counters; totals go on over the rank's end."""
        return self._values[rank].get(key, 0.0)

    def note(self, msg: Snapshot) -> None:
        """A rank's load, and its figures by name."""
        values, counted = self._values[msg.rank], self._counted[msg.rank]
        values |= _load_of(msg)
        for key, figure in msg.counters.items():
            if key not in values and not self._known(key):
                continue
            if key in self._growing:
                before = counted.get(key, 0.0)
                counted[key] = figure
                # Less than before: another process has begun to count.
                values[key] = values.get(key, 0.0) + (figure - before if figure >= before else figure)
            else:
                values[key] = figure

    def _known(self, key: str) -> bool:
        """Whether a key without a value yet is of a counter with that label; it is one from now on."""
        found = FIGURE.fullmatch(key)
        if found is None or found["name"] not in self.counters or found["label2"]:
            return False
        if tuple(self.counters[found["name"]].labels) != (found["label"],):
            return False
        self._growing.add(key)
        return True

    def collect(self) -> Iterator[Metric]:
        """The series as the last snapshots have them."""
        for name, series in GAUGES.items():
            yield self._plain(GaugeMetricFamily, name, series)
        for name, series in self.counters.items():
            yield self._plain(CounterMetricFamily, name, series)
        layout = self._layout
        for name, series in self.histograms.items():
            names = [*RANK_LABELS, *series.labels]
            histogram = HistogramMetricFamily(self._prefix + name, series.say, labels=names)
            for rank, labels in enumerate(self._labels):
                for own, keys in layout[name]:
                    pairs, total = _pairs(self._values[rank], keys, series)
                    histogram.add_metric([*labels, *own.values()], pairs, total)
            yield histogram

    def _plain(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, series: Series
    ) -> Metric:
        family = kind(self._prefix + name, series.say, labels=[*RANK_LABELS, *series.labels])
        for labels, values in zip(self._labels, self._values, strict=True):
            for key, own in self._keys_of(name, series, values):
                family.add_metric([*labels, *own], values[key])
        return family

    def _keys_of(
        self, name: str, series: Series, values: Mapping[str, float]
    ) -> Iterator[tuple[str, list[str]]]:
        """(key, values of the labels), those that came later included."""
        for own in series.combinations():
            yield key_of(name, own), list(own.values())
        known = set(_plain_keys(name, series))
        for key in values:
            if key not in known and key.startswith(name + "{"):
                found = FIGURE.fullmatch(key)
                assert found is not None
                yield key, [found["value"]]


def buckets_of(
    ranks: RankMetrics, rank: int, name: str, series: Series, own: Mapping[str, str] = NO_LABELS
) -> tuple[list[tuple[str, float]], float]:
    """A histogram's (bound, count up to it) pairs, and its sum."""
    return _pairs(ranks._values[rank], keys_of(name, series.bounds, own), series)


def _pairs(
    values: Mapping[str, float], keys: list[str], series: Series
) -> tuple[list[tuple[str, float]], float]:
    *buckets, total = map(values.__getitem__, keys)
    return list(zip(map(le_of, (*series.bounds, float("inf"))), buckets, strict=True)), total


def _plain_keys(name: str, series: Series) -> list[str]:
    return [key_of(name, own) for own in series.combinations()]


def _bucket_keys(name: str, series: Series) -> list[str]:
    return [key for own in series.combinations() for key in keys_of(name, series.bounds, own)]


def _load_of(msg: Snapshot) -> dict[str, float]:
    """Gauges that follow from a snapshot's own fields."""
    full_used = msg.full_pages_total - msg.full_pages_free
    window_used = msg.window_pages_total - msg.window_pages_free
    full_share = full_used / max(msg.full_pages_total, 1)
    window_share = window_used / max(msg.window_pages_total, 1)
    return {
        "num_running_reqs": msg.running,
        "num_queue_reqs": msg.waiting,
        "token_usage": max(full_share, window_share),
        "full_token_usage": full_share,
        "swa_token_usage": window_share,
        "num_used_tokens": full_used * PAGE_TOKENS,
        "kv_used_tokens": full_used * PAGE_TOKENS,
        "kv_available_tokens": msg.full_pages_free * PAGE_TOKENS,
        "max_total_num_tokens": msg.full_pages_total * PAGE_TOKENS,
        "num_pages": msg.full_pages_total,
    }
