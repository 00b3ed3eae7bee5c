"""Everything that a rank's process measures, put into the snapshots that its scheduler publishes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import msgspec

from engine.actors.core import Core, Effect
from engine.actors.links import Ref
from engine.actors.process import Process, Receive, Submit
from engine.exchange.meter import ExchangeMeter
from engine.messages import Message, PeerDown, RunStep, Snapshot, StepDone
from engine.metrics_buckets import Buckets, key_of
from engine.metrics_pauses import GcPauses
from engine.metrics_tables import HISTOGRAMS
from engine.rank_meter import Stages, Steps, Work
from engine.tap import Tap

Join = Callable[[Process], "anyio.Event | None"]
"""Connects a rank's process to the others; the event is set when that is done, None: at once."""

GC = "scheduler_gc_pause_seconds"
SYNC = "dp_attention_sync_wait_seconds"


class RankFigures:
    """Figures of one rank's process.

    exchange  the way to the peers notes there what it does
    latest    the last snapshot that left
    """

    def __init__(self, rank: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.exchange = ExchangeMeter(now_s)
        self.work = Work(now_s)
        self.stages = Stages(now_s)
        self.pauses = GcPauses(GC)
        self.latest: Snapshot | None = None
        self._steps = Steps(rank)
        self._sync = Buckets(SYNC, HISTOGRAMS[SYNC].bounds)
        self._fixed: dict[str, float] = {}
        self._now_s = now_s
        self._began_s = self._rested_s = now_s()
        self._idle_s = 0.0
        self._in_flight = 0
        self._api: Ref | None = None

    def watching(self, join: Join) -> Join:
        """A `join` that first stands at the doors of the process."""

        def joined(process: Process) -> anyio.Event | None:
            process.watch = self
            self._api = process.refs["api"]
            for name, see in (("api", self.published), ("detok", self.stages.sent)):
                process.reach(name, Tap(process.refs[name], see))
            self.pauses.watch()
            return join(process)

        return joined

    def arriving(self, ref: Ref) -> Ref:
        """As Watch.arriving."""
        return Tap(ref, self.stages.arrived)

    def working(self, name: str, core: Core, submit: Submit | None) -> tuple[Receive, Submit | None]:
        """As Watch.working; only the scheduler has jobs."""
        if submit is None:
            return core.receive, None
        key = key_of("startup_time_seconds", {"phase": "total"})
        self._fixed.setdefault(key, self._now_s() - self._began_s)
        receive = self.work.timed(core.receive)

        def received(msg: Any) -> list[Effect]:
            if type(msg) is StepDone:
                self.done()
            elif type(msg) is PeerDown:
                self._say_last()
            return receive(msg)

        def submitted(job: RunStep) -> None:
            self.submitted(job)
            submit(job)

        return received, submitted

    def _say_last(self) -> None:
        """A peer is gone, and with it this rank: no tick will publish why."""
        if self._api is not None and self.latest is not None:
            self._api.tell(self.published(self.latest))

    def submitted(self, job: RunStep) -> None:
        """A step goes to the device."""
        now_s = self._now_s()
        if not self._in_flight:
            self._idle_s += now_s - self._rested_s
        self._in_flight += 1
        self.stages.bound(job)
        self._steps.note(job)
        if len(job.ranks) > 1 and self.exchange.offered_s:
            self._sync.observe(now_s - self.exchange.offered_s)

    def done(self) -> None:
        """A step's results are on the host."""
        self._in_flight -= 1
        if not self._in_flight:
            self._rested_s = self._now_s()

    def published(self, msg: Message) -> Message:
        """A snapshot, on its way to the api process, with all figures; other messages as they are."""
        if not isinstance(msg, Snapshot):
            return msg
        self.latest = msgspec.structs.replace(msg, counters={**msg.counters, **self.figures()})
        return self.latest

    def figures(self) -> dict[str, float]:
        """All figures by name, as in Ledger."""
        resting_s = 0.0 if self._in_flight else self._now_s() - self._rested_s
        return {
            **self._fixed,
            "scheduler_idle_seconds_total": self._idle_s + resting_s,
            "scheduler_process_cpu_seconds_total": time.process_time(),
            **self.work.figures(),
            **self.stages.figures(),
            **self._steps.figures(),
            **self._sync.figures(),
            **self.pauses.seconds.figures(),
            **self.exchange.figures(),
        }
