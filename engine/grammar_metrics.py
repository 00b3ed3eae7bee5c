"""Series of compiled grammars: read from the compile service at each scrape, all of them from the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.grammar.service import GrammarService
from engine.grammar.service_counters import BUCKETS_S, GrammarCounters, Seconds

COUNTERS = {
    "num_grammar": ("requests for a grammar", ("wanted",)),
    "num_grammar_cache_hit": ("of those, answered from memory", ("memory",)),
    "num_grammar_aborted": ("grammars that were refused or failed", ("refused", "refusal", "broken", "full")),
    "num_grammar_timeout": ("grammars that were not compiled in time", ("timeouts",)),
}
"""Name -> (help, what it sums of the service's counts)."""

LABELLED = {
    "grammar_resolutions": (
        "grammars by where they came from",
        "source",
        {name: name for name in ("memory", "inflight", "disk", "local_compile_marker", "compile")},
    ),
    "grammar_cache_evictions": (
        "grammars that left the memory, by the limit that they met",
        "reason",
        {"bytes": "evicted_bytes", "entries": "evicted_entries"},
    ),
}
"""Name -> (help, label, its value -> name among the service's counts)."""

PHASES = ("lock", "read", "deserialize", "compile", "serialize", "publish", "prune")
DISK_ERRORS = ("corrupt", "scope", "io", "over_limit")
WORKER_ENDS = ("killed", "crashed", "retired")


class GrammarSeries(Collector):
    """Collector of one server. `service` is None until there is one: everything is 0 then."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.service: GrammarService | None = None
        self._prefix = prefix
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """The series as they are now."""
        service = self.service
        counters = service.counters if service else GrammarCounters()
        core = service.cores[-1] if service and service.cores else None
        counts: Mapping[str, int] = core.counts if core else Counter()
        for name, (say, parts) in COUNTERS.items():
            yield self._counter(name, say, "", {"": sum(counts.get(part, 0) for part in parts)})
        for name, (say, label, parts_of) in LABELLED.items():
            yield self._counter(
                name, say, label, {one: counts.get(part, 0) for one, part in parts_of.items()}
            )
        errors = {kind: counters.disk_errors[kind] for kind in DISK_ERRORS}
        yield self._counter("grammar_disk_errors", "faults of the store", "kind", errors)
        yield self._counter(
            "grammar_disk_pruned", "entries that left the store for others", "", {"": counters.disk_pruned}
        )
        ends = {cause: counters.worker_ends[cause] for cause in WORKER_ENDS}
        yield self._counter("grammar_worker_ends", "ends of compile workers", "cause", ends)
        yield from self._gauges(service)
        compile_s = {"": counters.phases.get("compile", Seconds())}
        yield self._histogram("grammar_compilation_time_seconds", "to compile a grammar", "", compile_s)
        phases = {phase: counters.phases.get(phase, Seconds()) for phase in PHASES}
        yield self._histogram("grammar_disk_phase_seconds", "parts of a worker's job", "phase", phases)

    def _gauges(self, service: GrammarService | None) -> Iterator[Metric]:
        core = service.cores[-1] if service and service.cores else None
        cache = core.cache if core else None
        figures = {
            "num_grammar_queue_reqs": ("requests that wait for a grammar", len(core.waits) if core else 0),
            "grammar_cache_bytes": ("grammars in memory", cache.bytes if cache else 0),
            "grammar_cache_entries": ("grammars in memory", len(cache) if cache else 0),
            "grammar_cache_pinned_bytes": ("of those, in use", cache.pinned_bytes if cache else 0),
            "grammar_inflight": (
                "grammars that are compiled or wait for a worker",
                len(core.keys.jobs) + len(core.keys.queue) if core else 0,
            ),
            "grammar_disk_cache_bytes": ("of the store", service.counters.disk_bytes if service else 0),
            "grammar_workers": (
                "compile workers, 0 until all are up",
                service.limits.workers if service and service.pool.started.is_set() else 0,
            ),
        }
        for name, (say, value) in figures.items():
            family = GaugeMetricFamily(self._prefix + name, say, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        names = ["model_name", "backend", "version"]
        info = GaugeMetricFamily(self._prefix + "grammar_backend_info", "1 once workers use it", labels=names)
        info.add_metric(
            [self._model, "xgrammar", version("xgrammar")], int(figures["grammar_workers"][1] > 0)
        )
        yield info

    def _labels(self, label: str, value: str) -> list[str]:
        return [self._model, value] if label else [self._model]

    def _names(self, label: str) -> list[str]:
        return ["model_name", label] if label else ["model_name"]

    def _counter(self, name: str, say: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, say, labels=self._names(label))
        for value, count in values.items():
            family.add_metric(self._labels(label, value), count)
        return family

    def _histogram(self, name: str, say: str, label: str, values: Mapping[str, Seconds]) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, say, labels=self._names(label))
        for value, seconds in values.items():
            total, buckets = 0, []
            for bound, count in zip((*BUCKETS_S, float("inf")), seconds.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
            family.add_metric(self._labels(label, value), buckets, seconds.total_s)
        return family
