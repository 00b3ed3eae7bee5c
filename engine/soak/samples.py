"""A line every so often: counters, memory, latencies, acceptance; and how fast memory grows."""

from __future__ import annotations

import time
from typing import Any

from engine.soak.figures import quantile, slope_per_hour
from engine.soak.ledger import Ledger
from engine.soak.watch import Watch

SETTLED_S = 600.0
"""Samples before are not of the steady state: caches fill, allocators take what they keep."""

JUDGED_MINUTES = 60.0
"""A slope over less says more of noise than of leaks."""


class Samples:
    """All samples of a soak; times in seconds since its traffic began."""

    def __init__(self, ledger: Ledger, watch: Watch) -> None:
        self.rows: list[dict[str, Any]] = []
        self._ledger, self._watch = ledger, watch
        self._began_s = 0.0
        self._seen = (0, 0, 0, 0.0, 0.0)

    def begin(self) -> None:
        """From now on time counts."""
        self._began_s = time.monotonic()

    def take(self) -> None:
        """One more."""
        ledger, watch = self._ledger, self._watch
        latencies, firsts, health = self._seen[:3]
        accepted = watch.newest.total("spec_accepted_tokens_total")
        verified = watch.newest.total("spec_verified_tokens_total")
        new_verified = verified - self._seen[4]
        times = ledger.latencies_s[latencies:]
        self.rows.append(
            {
                "at_s": round(time.monotonic() - self._began_s, 1),
                "requests": ledger.requests,
                "output_tokens": ledger.completion_tokens,
                "violations": ledger.violation_count,
                "latency_ms_p50": round(quantile(times, 0.5) * 1e3, 1),
                "latency_ms_p99": round(quantile(times, 0.99) * 1e3, 1),
                "first_event_ms_p50": round(quantile(ledger.firsts_s[firsts:], 0.5) * 1e3, 1),
                "health_ms_p99": round(quantile(watch.health_s[health:], 0.99) * 1e3, 1),
                "acceptance": round((accepted - self._seen[3]) / new_verified, 4)
                if new_verified > 0
                else None,
                "processes": {
                    one.name: {
                        "rss_mib": round(one.rss_mib, 2),
                        "own_mib": round(one.own_mib, 2),
                        "descriptors": one.descriptors,
                        "threads": one.threads,
                    }
                    for one in watch.usages()
                },
            }
        )
        self._seen = (len(ledger.latencies_s), len(ledger.firsts_s), len(watch.health_s), accepted, verified)

    def settled(self) -> list[dict[str, Any]]:
        """Samples after the first ten minutes, of shorter soaks those after their first third."""
        from_s = settled_after_s(self.rows[-1]["at_s"] if self.rows else 0.0)
        return [row for row in self.rows if row["at_s"] >= from_s]

    def slopes(self) -> dict[str, float | None]:
        """MiB of memory of its own an hour, of each process that lived until the end."""
        rows = self.settled()
        names = list(rows[-1]["processes"]) if rows else []
        return {name: slope_of([row for row in rows if name in row["processes"]], name) for name in names}


def settled_after_s(whole_s: float) -> float:
    """When the steady state of so long a soak begins."""
    return min(SETTLED_S, whole_s / 3)


def slope_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """MiB an hour; None for too few samples."""
    memory = [row["processes"][name]["own_mib"] for row in rows]
    slope = slope_per_hour([row["at_s"] for row in rows], memory)
    return None if slope is None else round(slope, 3)
