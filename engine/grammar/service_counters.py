"""What the compile service counts, under its metrics' names; nothing decides by it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from engine.grammar.worker_job import Finished, Outcome

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass
class Seconds:
    """A histogram: counts up to each of BUCKETS_S and beyond, and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """How many were added."""
        return sum(self.counts)


@dataclass
class GrammarCounters:
    """Since start.

    requests      of the core, as `Grammars.counts` names them
    phases        seconds of workers by phase: lock, read, deserialize, compile, serialize, publish
    disk_errors   by kind: corrupt, scope, io, over_limit
    disk_bytes    of the store, as the newest answer of a worker had it
    finished      jobs whose share the disk has, too
    worker_ends   by cause: killed (its job's time was over), crashed, retired
    """

    requests: Counter[str] = field(default_factory=Counter)
    phases: dict[str, Seconds] = field(default_factory=dict)
    disk_errors: Counter[str] = field(default_factory=Counter)
    disk_bytes: int = 0
    disk_pruned: int = 0
    finished: int = 0
    worker_ends: Counter[str] = field(default_factory=Counter)

    def note(self, told: Outcome | Finished) -> None:
        """What a worker reports with an answer, and behind it."""
        for phase, seconds in told.seconds.items():
            self.phases.setdefault(phase, Seconds()).add(seconds)
        self.disk_errors.update(told.errors)
        if isinstance(told, Finished):
            self.finished += told.jobs
            self.disk_bytes = told.store_bytes
            self.disk_pruned += told.pruned
            if told.retires:
                self.worker_ends["retired"] += 1

    def figures(self) -> dict[str, float]:
        """Counters by metric name, a label behind it in braces."""
        asked = self.requests
        sources = ("memory", "inflight", "disk", "local_compile_marker", "compile")
        found: dict[str, float] = {
            "num_grammar_total": asked["wanted"],
            "num_grammar_cache_hit_total": asked["memory"],
            "num_grammar_aborted_total": asked["refused"]
            + asked["refusal"]
            + asked["broken"]
            + asked["full"],
            "num_grammar_timeout_total": asked["timeouts"],
            "grammar_disk_cache_bytes": self.disk_bytes,
        }
        found |= {f'grammar_resolutions_total{{source="{one}"}}': asked[one] for one in sources}
        for reason in ("bytes", "entries"):
            found[f'grammar_cache_evictions_total{{reason="{reason}"}}'] = asked[f"evicted_{reason}"]
        for kind in ("corrupt", "scope", "io", "over_limit"):
            found[f'grammar_disk_errors_total{{kind="{kind}"}}'] = self.disk_errors[kind]
        return found
