"""Compiled grammars for the HTTP side: one service in the api process, for all ranks.

A key is compiled once for the whole engine, in worker processes that can be killed, never on a loop and never
on a scheduler's thread. What comes of it travels as data: a refusal is answered before any rank hears of the
request, and a rank that gets a request gets the same artifact as every other rank. So no answer depends on a
rank, and none needs to be agreed on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import anyio

from engine.actors.ask import Asks
from engine.actors.grammar import Grammars
from engine.actors.grammar_keys import GrammarLimits
from engine.actors.mailbox import Mailbox
from engine.actors.process import Process
from engine.grammar.key import GrammarKey
from engine.grammar.service_counters import GrammarCounters
from engine.grammar.service_pool import CompilerPool
from engine.grammar.worker import WorkerSettings
from engine.messages import GrammarLeft, GrammarReady, GrammarWanted
from engine.threads import allowed

TICK_S = 0.05
"""How late a deadline may be noticed."""

GRACE_S = 5.0
"""The core answers every request within its time; an asker that still waits so much longer sees a fault."""

MOST_WORKERS = 4


def allowed_cpus() -> float:
    """Processors that this process may use: its own, or its control group's quota where that is less."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(float(allowed()), int(quota) / int(period))
    except (OSError, ValueError):
        # No control group, or "max": the processors stand.
        return float(allowed())


def worker_count() -> int:
    """Compile workers for this host: half of its processors, so that ranks keep theirs; one to four."""
    return max(1, min(MOST_WORKERS, int(allowed_cpus() // 2)))


@dataclass
class GrammarService:
    """What the HTTP side holds.

    counters  for metrics
    pool      the workers; `pool.started` is set once all are up
    """

    mailbox: Mailbox
    asks: Asks
    limits: GrammarLimits
    counters: GrammarCounters
    pool: CompilerPool
    cores: list[Grammars] = field(default_factory=list)
    _tickets: Callable[[], int] = field(default_factory=lambda: count(1).__next__)

    @asynccontextmanager
    async def grammar(self, key: GrammarKey) -> AsyncIterator[GrammarReady]:
        """The compiled grammar; its entry stays in memory during the block. Leaving early cancels the wait.

        raises  GrammarRefused (400), GrammarTimedOut (408), QueueFull (429), NotServing (503), GrammarFailed,
                MailboxFull (503)
        """
        ticket = self._tickets()
        wanted = GrammarWanted(key.wire(), ticket, anyio.current_time())
        within_s = self.limits.timeout_s + GRACE_S
        try:
            yield await self.asks.ask(self.mailbox, wanted, within_s)
        finally:
            with anyio.CancelScope(shield=True):
                # Behind the question, and into the mailbox's reserve: a lost word would pin the entry.
                await self.mailbox.offer(GrammarLeft(ticket))

    def figures(self) -> dict[str, float]:
        """Counters and gauges by metric name."""
        core = self.cores[-1]
        self.counters.requests = core.counts
        return self.counters.figures() | {
            "grammar_cache_bytes": core.cache.bytes,
            "grammar_cache_entries": len(core.cache),
            "grammar_cache_pinned_bytes": core.cache.pinned_bytes,
            "grammar_inflight": len(core.keys.jobs) + len(core.keys.queue),
        }


def start_service(process: Process, limits: GrammarLimits, settings: WorkerSettings) -> GrammarService:
    """Starts core, clock and workers in a process; `await service.pool.started.wait()` before serving."""
    counters = GrammarCounters()
    mailbox = process.mailbox("grammar")
    pool = CompilerPool(
        process.mailbox("compilers"), mailbox, settings, limits.workers, counters, process.report
    )
    service = GrammarService(mailbox, process.asks, limits, counters, pool)

    def core() -> Grammars:
        service.cores.append(Grammars(limits))
        return service.cores[-1]

    process.start("grammar", core)
    process.spawn(pool.run)
    process.tick("grammar", TICK_S, lambda: 0.0)
    return service
