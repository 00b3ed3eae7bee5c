"""Compiled grammars, in specs/grammar.toml: found in memory, joined while one is compiled, or compiled once.

One thread decides, so that no lock is needed: a request stands among those that wait before its compile can
end. Where the work is done, and what a compiled grammar is, this core doesn't know.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from engine.actors.core import Core, Reply, Send
from engine.actors.grammar_keys import GrammarKeys, GrammarLimits, Refusal
from engine.errors import EngineError, GrammarFailed, GrammarRefused, NotServing, QueueFull
from engine.grammar.cache import GrammarCache
from engine.messages import (
    GrammarBroken,
    GrammarBuilt,
    GrammarCompile,
    GrammarKill,
    GrammarLeft,
    GrammarReady,
    GrammarUnfit,
    GrammarWanted,
    Stop,
    Tick,
)

Answer = GrammarBuilt | GrammarUnfit | GrammarBroken

BUSY = ("compiling", "ending")
"""A worker has the key."""


class Grammars(Core):
    """Core of specs/grammar.toml.

    keys   what is queued, with a worker, kept or refused    cache     the grammars in memory
    waits  ticket -> key that it waits for                   reads     ticket -> key of its entry
    idle   workers without a job                             last_job  number of the newest job
    """

    SPEC: ClassVar[str] = "grammar"
    DATA: ClassVar[tuple[str, ...]] = ("keys", "cache", "waits", "reads", "idle", "last_job")

    def __init__(self, limits: GrammarLimits, workers: str = "compilers") -> None:
        """workers  the actor that takes the jobs."""
        super().__init__()
        self.limits = limits
        self.workers = workers
        places = limits.cache_entries + limits.refusals + limits.queued + 2 * limits.workers
        self.keys = GrammarKeys(places, self._answer, self._kill)
        self.cache = GrammarCache(limits.cache_bytes, limits.cache_entries)
        self.waits: dict[int, str] = {}
        self.reads: dict[int, str] = {}
        self.idle = limits.workers
        self.last_job = 0
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Since start, for metrics; no decision reads them.

        Requests: wanted, and of those memory, inflight, refusal, full. Jobs: compiles and each source;
        refused; timeouts; broken, and each by its kind. Memory: evicted_bytes, evicted_entries, unkept.
        """
        return self._counts

    # ---- guards -------------------------------------------------------------------------------

    def is_kept(self, msg: GrammarWanted) -> bool:
        """A hit."""
        return msg.key in self.cache

    def is_on_its_way(self, msg: GrammarWanted) -> bool:
        """Somebody waits for it, or a worker has it."""
        return self.keys.is_on_its_way(msg.key)

    def is_refused(self, msg: GrammarWanted) -> bool:
        """It can't be compiled, as is remembered."""
        refusal = self.keys.refusals.get(msg.key)
        return refusal is not None and msg.now_s < refusal.until_s

    def has_room(self, msg: GrammarWanted) -> bool:
        """A worker is free, or the queue isn't full."""
        return self.idle > 0 or len(self.keys.queue) < self.limits.queued

    def is_waiting(self, msg: GrammarLeft) -> bool:
        """It has no answer yet."""
        return msg.ticket in self.waits

    def is_reading(self, msg: GrammarLeft) -> bool:
        """It got a grammar that is kept."""
        return msg.ticket in self.reads

    def is_in_flight(self, msg: Answer) -> bool:
        """The job has no answer yet."""
        return msg.job in self.keys.jobs

    # ---- a request ----------------------------------------------------------------------------

    def give(self, msg: GrammarWanted) -> None:
        """At once, from memory."""
        self._count("wanted", "memory")
        self.reads[msg.ticket] = msg.key
        self.emit(Reply(msg.slot, GrammarReady(self.cache.read(msg.key), "memory")))

    def join(self, msg: GrammarWanted) -> None:
        """With the others; behind a worker that is being ended it is the first of the next compile."""
        self._count("wanted", "inflight")
        self._wait(msg)

    def own(self, msg: GrammarWanted) -> None:
        """Its key is compiled because of it."""
        self._count("wanted")
        self.keys.fire("Queue", msg.key)
        self._wait(msg)
        self._dispatch()

    def repeat_refusal(self, msg: GrammarWanted) -> None:
        """400, as those before."""
        self._count("wanted", "refusal")
        self._answer(msg.slot, GrammarRefused(self.keys.refusals[msg.key].text))

    def refuse_full(self, msg: GrammarWanted) -> None:
        """429: later there may be room."""
        self._count("wanted", "full")
        queued = len(self.keys.queue)
        self._answer(msg.slot, QueueFull(f"{queued} grammars wait for {self.limits.workers} compile workers"))

    def refuse_stopped(self, msg: GrammarWanted) -> None:
        """503: the server is going down."""
        self._answer(msg.slot, NotServing("the server is shutting down"))

    def leave(self, msg: GrammarLeft) -> None:
        """Its client has gone. A job that has begun goes on, whoever waits."""
        key = self.waits.pop(msg.ticket)
        slots = self.keys.waiting[key]
        del slots[msg.ticket]
        if not slots:
            del self.keys.waiting[key]
            self.keys.fire("Leave", key)

    def release(self, msg: GrammarLeft) -> None:
        """It uses its grammar no more."""
        self.cache.release(self.reads.pop(msg.ticket))

    def _wait(self, msg: GrammarWanted) -> None:
        self.waits[msg.ticket] = msg.key
        self.keys.waiting.setdefault(msg.key, {})[msg.ticket] = msg.slot
        self.keys.due_s.setdefault(msg.key, msg.now_s + self.limits.timeout_s)

    # ---- a job ---------------------------------------------------------------------------------

    def keep(self, msg: GrammarBuilt) -> None:
        """All who wait get it; it stays in memory where it fits beside what is read."""
        key = self._ended(msg.job)
        self._count("compiles", msg.source)
        slots = self.keys.waiting.pop(key, {})
        kept, gone = self.cache.put(key, msg.value, msg.size + len(key), len(slots))
        for evicted, reason in gone:
            self._count(f"evicted_{reason}")
            self.keys.fire("Drop", evicted)
        for ticket, slot in slots.items():
            del self.waits[ticket]
            if kept:
                self.reads[ticket] = key
            self.emit(Reply(slot, GrammarReady(msg.value, msg.source)))
        if not kept:
            self._count("unkept")
        self.keys.fire("Keep" if kept else "Spend", key)
        self._dispatch()

    def refuse(self, msg: GrammarUnfit) -> None:
        """The client's fault; it is remembered for a while, and the oldest such memory may have to go."""
        key = self._ended(msg.job)
        self._count("refused")
        self._fail(key, GrammarRefused(msg.text))
        if len(self.keys.refusals) >= self.limits.refusals:
            self.keys.fire("Drop", next(iter(self.keys.refusals)))
        self.keys.fire("Refuse", key, Refusal(msg.text, msg.now_s + self.limits.refusal_s))
        self._dispatch()

    def fail(self, msg: GrammarBroken) -> None:
        """Ours; those who came while the worker was being ended wait for the next compile."""
        key = self._ended(msg.job, whoever_waits=self.keys.state(self.keys.jobs[msg.job]) == "ending")
        self._count("broken", msg.kind)
        if self.keys.state(key) == "compiling":
            self._fail(key, GrammarFailed(f"a grammar was not compiled ({msg.kind}): {msg.text}"))
        self.keys.fire("Fail", key)
        self._dispatch()

    def _ended(self, job: int, whoever_waits: bool = False) -> str:
        """The key of a job that has its answer. `whoever_waits`: for a further compile, within their time."""
        key = self.keys.jobs.pop(job)
        self.idle += 1
        if not whoever_waits:
            self.keys.due_s.pop(key, None)
        return key

    def _fail(self, key: str, error: EngineError) -> None:
        for ticket, slot in self.keys.waiting.pop(key, {}).items():
            del self.waits[ticket]
            self._answer(slot, error)

    def _dispatch(self) -> None:
        """Idle workers get the oldest keys."""
        while self.idle and self.keys.queue:
            key = self.keys.queue[0]
            self.keys.fire("Start", key)
            self.last_job += 1
            self.keys.jobs[self.last_job] = key
            self.idle -= 1
            self.emit(Send(self.workers, GrammarCompile(self.last_job, key)))

    # ---- time and end ----------------------------------------------------------------------------

    def expire(self, msg: Tick) -> None:
        """Whatever has waited or was remembered long enough."""
        for key in self.keys.overdue(msg.now_s):
            self._count("timeouts")
            self._time_out(key, f"a grammar was not compiled within {self.limits.timeout_s:g} s")
        for key in [key for key, one in self.keys.refusals.items() if one.until_s <= msg.now_s]:
            self.keys.fire("Drop", key)

    def _time_out(self, key: str, text: str) -> None:
        for ticket in self.keys.waiting.get(key, {}):
            del self.waits[ticket]
        self.keys.fire("Overdue", key, text)

    def end_all(self, msg: Stop) -> None:
        """Whoever waits hears why; then nobody waits for what workers still have, and they are ended."""
        for key in list(self.keys.waiting):
            self._fail(key, NotServing("the server is shutting down"))
            self.keys.fire("Leave", key)
        for key in list(self.keys.due_s):
            self.keys.fire("Overdue", key, "")

    def _answer(self, slot: Any, error: EngineError) -> None:
        self.emit(Reply(slot, error))

    def _kill(self, job: int) -> None:
        self.emit(Send(self.workers, GrammarKill(job)))

    def _count(self, *names: str) -> None:
        self._counts.update(names)

    # ---- invariants ------------------------------------------------------------------------------

    def one_compile_a_key(self) -> bool:
        """I4: jobs are those of the keys that workers have, one each."""
        busy = [key for key, at in self.keys.place_of.items() if self.keys.machine.state(at) in BUSY]
        return sorted(busy) == sorted(self.keys.jobs.values()) and self.idle == self.limits.workers - len(
            busy
        )

    def memory_is_bounded(self) -> bool:
        """G1: limits hold; the readers of each entry are the tickets that read it."""
        kept = [key for key in self.keys.place_of if self.keys.state(key) == "ready"]
        readers = Counter(self.reads.values())
        return (
            self.cache.is_sound()
            and sorted(kept) == sorted(self.cache.keys)
            and all(self.cache.readers(key) == readers[key] for key in kept)
            and readers.keys() <= set(kept)
            and len(self.keys.refusals) <= self.limits.refusals
        )

    def tickets_are_in_one_place(self) -> bool:
        """G2: and each that waits stands with its key."""
        waiting = {ticket: key for key, slots in self.keys.waiting.items() for ticket in slots}
        return waiting == self.waits and not self.waits.keys() & self.reads.keys()
