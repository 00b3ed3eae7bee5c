"""The compile workers of a server: started, given jobs, killed when a job's time is over, and replaced."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

import anyio
import msgspec

from engine.actors.mailbox import Mailbox
from engine.children import ended, how_it_ended, spawn
from engine.errors import GrammarFailed
from engine.grammar.service_counters import GrammarCounters
from engine.grammar.service_worker import Worker
from engine.grammar.worker import FINISH, READY, WorkerSettings
from engine.grammar.worker_job import Finished, Outcome
from engine.messages import GrammarBroken, GrammarBuilt, GrammarCompile, GrammarKill, GrammarUnfit

START_S = 30.0
"""A worker is up after 0.3 s; on a host that is starting up, after many times that."""

PAUSE_S = 1.0
"""Between two starts, where one has failed."""

FINISH_S = 30.0
"""What a worker may take behind its answer: two and a half times its compile as a rule."""

END_S = 5.0
"""What a worker that can't start may take to end by itself, so that it is known how it did."""

QUIET_S = 0.05
"""No job for so long: there is time for the disk. Who sends jobs sends the next one when it has an answer."""

MOST_OWED = 256
"""Jobs of a worker whose grammars it still holds for the disk, however many others wait."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Answer = GrammarBuilt | GrammarUnfit | GrammarBroken


class CompilerPool:
    """Takes GrammarCompile and GrammarKill from its mailbox; each job gets one answer, whatever happens.

    grammar   the mailbox that answers go to
    workers   processes at a time
    report    prints what went wrong with a worker, for a person
    """

    def __init__(
        self,
        mailbox: Mailbox,
        grammar: Mailbox,
        settings: WorkerSettings,
        workers: int,
        counters: GrammarCounters,
        report: Callable[[str], None],
    ) -> None:
        self.counters = counters
        self.started = anyio.Event()
        self.running: dict[int, Worker] = {}
        self.workers: set[Worker] = set()
        self._mailbox = mailbox
        self._grammar = grammar
        self._told = msgspec.msgpack.encode(settings)
        self._places = workers
        self._report = report
        self._jobs: deque[GrammarCompile] = deque()
        self._killed: set[int] = set()
        self._wake = anyio.Event()
        self._up = 0

    async def run(self) -> None:
        """For ever. `started` is set once every worker is up.

        raises  GrammarFailed where the first worker of a place doesn't come up: the server doesn't start
        """
        async with anyio.create_task_group() as tasks:
            for place in range(self._places):
                tasks.start_soon(self._keep, place)
            while True:
                for msg in await self._mailbox.take():
                    if isinstance(msg, GrammarCompile):
                        self._jobs.append(msg)
                        self._stir()
                    elif isinstance(msg, GrammarKill):
                        await self._end(msg.job)

    async def _end(self, job: int) -> None:
        """A job's time is over. One that has its answer by now is left alone."""
        worker = self.running.get(job)
        if worker is not None:
            self._killed.add(job)
            worker.child.kill()
            return
        for waiting in self._jobs:
            if waiting.job == job:
                self._jobs.remove(waiting)
                await self._grammar.offer(GrammarBroken(job, "killed", "no worker was up"))
                return

    async def _keep(self, place: int) -> None:
        """One worker after the other."""
        first = True
        while True:
            worker = await self._start(place)
            if isinstance(worker, str):
                if first:
                    raise GrammarFailed(f"grammar worker {place} doesn't start: {worker}")
                self._report(f"grammar worker {place} didn't start: {worker}")
                await anyio.sleep(PAUSE_S)
                continue
            if first:
                first = False
                self._up += 1
                if self._up == self._places:
                    self.started.set()
            await self._use(worker)

    async def _start(self, place: int) -> Worker | str:
        """A worker that is up, or why there is none."""
        command = [sys.executable, "-m", "engine.grammar.worker"]
        with anyio.CancelScope(shield=True):  # Begun and not finished, it would leave a process behind.
            worker = Worker(await spawn(f"grammar worker {place}", command, self._told, ENVIRONMENT))
        hello, late = None, True
        try:
            with anyio.move_on_after(START_S):
                hello = await worker.hear()
                late = False
            if hello != READY and not late:
                await ended(worker.child, END_S)
        finally:
            if hello != READY:
                await self._bury(worker)
        if hello == READY:
            return worker
        if hello is not None:
            return hello.decode("utf-8", "replace")
        return f"it was not up after {START_S:g} s" if late else f"it {self._how(worker)}"

    async def _use(self, worker: Worker) -> None:
        """Jobs, until the worker ends or is of no more use."""
        self.workers.add(worker)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, worker)
                while await self._step(worker):
                    pass
                tasks.cancel_scope.cancel()
        finally:
            self.workers.discard(worker)
            await self._bury(worker)

    async def _watch(self, worker: Worker) -> None:
        await worker.child.process.wait()
        worker.gone = True
        self._stir()

    async def _step(self, worker: Worker) -> bool:
        """The oldest job; where none waits, the disk's share of an old one. Whether the worker goes on."""
        with anyio.move_on_after(QUIET_S if worker.owed else None):
            while not (self._jobs or worker.gone):
                await self._wake.wait()
        if worker.gone:
            return await self._lost(worker)
        if self._jobs and worker.owed < MOST_OWED:
            return await self._do(worker, self._jobs.popleft())
        going_on = await self._finish(worker)
        while going_on and worker.owed and not self._jobs:
            going_on = await self._finish(worker)
        return going_on

    async def _lost(self, worker: Worker) -> bool:
        """It ended before it had a job."""
        await worker.child.process.wait()
        self._note("crashed", f"{worker.child.name} without a job: {self._how(worker)}")
        self._stir()
        return False

    async def _do(self, worker: Worker, job: GrammarCompile) -> bool:
        """One job and its answer; whether the worker can take another."""
        self.running[job.job] = worker
        try:
            if not await worker.tell(job.key.encode("utf-8")) and job.job not in self._killed:
                self._jobs.appendleft(job)
                return await self._lost(worker)
            data = await worker.hear()
            answer = await self._answer(worker, job, data)
        finally:
            del self.running[job.job]
            self._killed.discard(job.job)
        await self._grammar.offer(answer)
        worker.owed += 1
        return data is not None

    async def _answer(self, worker: Worker, job: GrammarCompile, data: bytes | None) -> Answer:
        if data is None:
            await worker.child.process.wait()
            kind = "killed" if job.job in self._killed else "crashed"
            self._note(kind, f"{worker.child.name}: {self._how(worker)}")
            return GrammarBroken(job.job, kind, self._how(worker))
        outcome = msgspec.msgpack.decode(data, type=Outcome)
        self.counters.note(outcome)
        if outcome.kind == "built" and outcome.artifact is not None:
            size = len(outcome.artifact.payload) + len(outcome.artifact.key)
            return GrammarBuilt(job.job, outcome.artifact, size, outcome.source)
        if outcome.kind == "unfit":
            return GrammarUnfit(job.job, outcome.text, anyio.current_time())
        return GrammarBroken(job.job, outcome.kind, outcome.text)

    async def _finish(self, worker: Worker) -> bool:
        """The disk gets its share of the worker's oldest job; whether the worker is of further use."""
        data = None
        with anyio.move_on_after(FINISH_S):
            data = await worker.hear() if await worker.tell(FINISH) else None
        if data is None:
            self._note("crashed", f"{worker.child.name} behind an answer: {self._how(worker)}")
            return False
        finished = msgspec.msgpack.decode(data, type=Finished)
        worker.owed -= finished.jobs
        self.counters.note(finished)
        return not finished.retires

    def _note(self, cause: str, text: str) -> None:
        self.counters.worker_ends[cause] += 1
        if cause != "killed":
            self._report(text)

    def _how(self, worker: Worker) -> str:
        code = worker.child.process.returncode
        return "it is alive" if code is None else how_it_ended(code)

    def _stir(self) -> None:
        self._wake.set()
        self._wake = anyio.Event()

    async def _bury(self, worker: Worker) -> None:
        """No process stays behind, whatever ends this one."""
        worker.child.kill()
        with anyio.CancelScope(shield=True):
            await worker.child.process.wait()
            await worker.child.stream.aclose()
