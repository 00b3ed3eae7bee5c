"""What must hold all the time and in every rest: health, counters, log, processes, no request left behind."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import httptools

from engine.soak import processes
from engine.soak.exposition import Figures, drained, read, shrunk
from engine.soak.http import Answer, ask, request_bytes
from engine.soak.ledger import Ledger
from engine.soak.server import Server

PROBES = ("/health", "/ready", "/health_scheduler")
BROKEN = (OSError, TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError, httptools.HttpParserError)
"""What asking raises where no whole answer comes."""

PROBE_WITHIN_S, REST_WITHIN_S = 20.0, 6.0
LOOK_S = 1.0
"""Between two looks."""

WORKER, RETIRED = "worker", 'cause="retired"'
"""Name of a process that compiles grammars. One that is still busy behind its answer is replaced."""

THREADS_SPARE = 4
"""The event loop's library keeps worker threads for a while, and starts more when jobs come at once."""


class Watch:
    """Looks at a server and tells the ledger what is wrong.

    health_s   times of all health answers
    workers_replaced  grammar workers that have ended
    polls      looks that saw the metrics; busy: in how many of them each rank had running requests
    """

    def __init__(self, server: Server, ledger: Ledger, prefix: str) -> None:
        self.health_s: list[float] = []
        self.polls = 0
        self.busy: dict[str, int] = {}
        self.first = Figures()
        self.newest = Figures()
        self.mapped: set[str] = set()
        self.ended = False
        self.workers_replaced = 0
        self._server, self._ledger, self._prefix = server, ledger, prefix
        self._names: dict[int, str] = {}
        self._known: dict[int, int] = {}
        self._most: dict[int, tuple[int, int, int]] = {}
        self._opened: dict[int, list[str]] = {}
        self._workers = 0
        self._ends: dict[str, float] = {}

    async def get(self, path: str) -> Answer:
        """One answer. raises one of BROKEN"""
        raw = request_bytes("GET", path, self._server.host)
        return await ask(self._server.host, self._server.port, raw, PROBE_WITHIN_S)

    async def scrape(self) -> Figures:
        """The metrics now. raises one of BROKEN"""
        answer = await self.get("/metrics")
        if answer.status != 200:
            raise OSError(f"/metrics answers {answer.status}")
        return read(bytes(answer.body).decode(), self._prefix)

    async def begin(self) -> None:
        """The state that everything is compared with."""
        self.first = self.newest = await self.scrape()
        self._known = processes.tree(self._server.pid)
        self.name_all()
        self._workers = sum(name.startswith(WORKER) for name in self._names.values())
        self._ends = dict(self.first.values.get("grammar_worker_ends_total", {}))

    def name_all(self) -> None:
        """A name for each process: ranks and workers are numbered as they were started."""
        counts: dict[str, int] = {}
        for pid in sorted(self._known, key=lambda one: (self._known[one], one)):
            name = processes.name_of(pid)
            number = counts[name] = counts.get(name, -1) + 1
            self._names[pid] = name if name == "api" else f"{name}{number}"

    async def look(self) -> None:
        """Health, metrics, log and processes once."""
        self.look_at_processes()
        for line in self._server.wrong_lines():
            self._ledger.violate("log", line)
        for path in PROBES:
            try:
                answer = await self.get(path)
            except BROKEN as error:
                self._ledger.violate("health", f"{path}: {error!r}")
                return
            self.health_s.append(answer.whole_s)
            if answer.status != 200:
                self._ledger.violate("health", f"{path}: {answer.status} {bytes(answer.body[:300])!r}")
        try:
            now = await self.scrape()
        except BROKEN as error:
            self._ledger.violate("metrics", repr(error))
            return
        for fault in shrunk(self.newest, now):
            self._ledger.violate("metrics", fault)
        self.newest = now
        self.polls += 1
        for rank in now.ranks():
            running = now.total("num_running_reqs", dp_rank=rank) > 0
            self.busy[rank] = self.busy.get(rank, 0) + running

    def look_at_processes(self) -> None:
        """No process may come or go; each difference is told once. Grammar workers retire, as designed."""
        now = processes.tree(self._server.pid)
        for pid in self._known.keys() - now.keys():
            if self._names[pid].startswith(WORKER):
                self.workers_replaced += 1
            else:
                self._ledger.violate("processes", f"{self._names[pid]} ({pid}) has ended")
        for pid in now.keys() - self._known.keys():
            name = self._names[pid] = f"{processes.name_of(pid)}-{pid}"
            if not name.startswith(WORKER):
                self._ledger.violate("processes", f"{name} has been started")
        if self._server.pid not in now:
            self.ended = True
        self._known = now

    def usages(self) -> list[processes.Usage]:
        """Of each process."""
        found = [processes.usage(pid, self._names[pid]) for pid in sorted(self._known)]
        usages = [one for one in found if one is not None]
        self.mapped |= {name for one in usages for name in one.shared if name.startswith("/dev/shm/")}
        return usages

    async def rest(self) -> None:
        """With no request under way: nothing is held, counters agree, nothing has grown."""
        await self._until_none(lambda now: drained(now), "rest")
        await self._until_none(lambda now: self._ledger.compare(self.first, now), "counters")
        await self._until_none(self.workers_wrong, "processes")
        self._ends = dict(self.newest.values.get("grammar_worker_ends_total", {}))
        await self._make_token()
        await self._until_none(lambda _: self.grown(), "growth")
        self.accept_growth()

    def workers_wrong(self, now: Figures) -> list[str]:
        """As many grammar workers as at first, and none that ended without being told to."""
        name = "grammar_worker_ends_total"
        faults = [
            f"{name}{key} grew to {value:g}"
            for key, value in now.values.get(name, {}).items()
            if value > self._ends.get(key, 0.0) and RETIRED not in key
        ]
        count = sum(processes.name_of(pid) == WORKER for pid in processes.tree(self._server.pid))
        if count != self._workers:
            faults.append(f"{count} grammar workers, {self._workers} at first")
        return faults

    async def _make_token(self) -> None:
        """Every rank makes a token for the probe that asks for one; servers without it answer 404."""
        try:
            answer = await self.get("/health_generate")
        except BROKEN as error:
            self._ledger.violate("health", f"/health_generate: {error!r}")
            return
        if answer.status not in (200, 404):
            evidence = bytes(answer.body[:300]).decode(errors="replace")
            self._ledger.violate("health", f"/health_generate: {answer.status} {evidence}")

    async def _until_none(self, faults_of: Callable[[Figures], list[str]], what: str) -> None:
        """Aborts and closed connections take a moment; what is wrong for longer is a violation."""
        deadline_s = time.monotonic() + REST_WITHIN_S
        faults: list[str] = []
        while True:
            try:
                faults = faults_of(await self.scrape())
            except BROKEN as error:
                faults = [repr(error)]
            if not faults or time.monotonic() > deadline_s or self.ended:
                break
            await anyio.sleep(0.3)
        for fault in faults:
            self._ledger.violate(what, fault)

    def grown(self) -> list[str]:
        """Descriptors, threads and shared memory above those of the first rest."""
        faults = []
        for one in self.usages():
            if one.pid not in self._most:
                continue
            opened, threads, shared = self._most[one.pid]
            if one.descriptors > opened:
                new = list(processes.descriptors(one.pid))
                for known in self._opened[one.pid]:
                    if known in new:
                        new.remove(known)
                faults.append(f"{one.name}: {one.descriptors} descriptors, {opened} before: {new[:20]}")
            if one.threads > threads + THREADS_SPARE:
                faults.append(f"{one.name}: {one.threads} threads, {threads} before")
            if len(one.shared) > shared:
                faults.append(
                    f"{one.name}: {len(one.shared)} shared-memory objects, {shared} before: {one.shared}"
                )
        return faults

    def accept_growth(self) -> None:
        """What is known is not told again."""
        for one in self.usages():
            opened, threads, shared = self._most.get(one.pid, (0, 0, 0))
            now = one.threads if one.threads > threads + THREADS_SPARE or not threads else threads
            self._most[one.pid] = (max(opened, one.descriptors), now, max(shared, len(one.shared)))
            self._opened[one.pid] = processes.descriptors(one.pid)
