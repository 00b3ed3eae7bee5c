"""The keys that are wanted, compiled, kept or refused: one place each, its life in specs/grammar_key.toml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.actors.core import table_of
from engine.errors import EngineError, GrammarTimedOut
from engine.fsm.load import spec_named
from engine.fsm.vector import VectorMachine

Places = NDArray[np.intp]


@dataclass(frozen=True)
class GrammarLimits:
    """Bounds, all positive but `queued`, which may be 0.

    workers      jobs at a time                        queued    keys that may wait for a worker
    cache_bytes, cache_entries  of the memory cache    refusals  keys whose refusal is remembered
    timeout_s    from the request that has a key compiled to its end, the wait for a worker included; who
                 joins later waits for what is left of it
    refusal_s    how long a refusal is remembered
    """

    workers: int = 1
    queued: int = 256
    cache_bytes: int = 256 << 20
    cache_entries: int = 1024
    refusals: int = 1024
    timeout_s: float = 8.0
    refusal_s: float = 120.0


class Refusal(NamedTuple):
    """Why the library refuses a key, and until when that is remembered, on the loop's clock."""

    text: str
    until_s: float


class GrammarKeys:
    """All keys that are not forgotten.

    waiting   key -> reply slots of the requests that wait for it, by ticket
    queue     keys that wait for a worker, oldest first
    due_s     key -> when its compile, or the wait for one, is over
    jobs      job -> key of what workers have
    refusals  key -> why, oldest first

    tell      sends an answer to a reply slot
    kill      ends a job
    """

    MESSAGES: ClassVar[None] = None

    def __init__(
        self, capacity: int, tell: Callable[[Any, EngineError], None], kill: Callable[[int], None]
    ) -> None:
        self.machine = VectorMachine(table_of(spec_named("grammar_key")), self, capacity)
        self.place_of: dict[str, int] = {}
        self.waiting: dict[str, dict[int, Any]] = {}
        self.queue: list[str] = []
        self.due_s: dict[str, float] = {}
        self.jobs: dict[int, str] = {}
        self.refusals: dict[str, Refusal] = {}
        self._keys = [""] * capacity
        self._events = self.machine.table.event_index
        self._tell = tell
        self._kill = kill

    def state(self, key: str) -> str:
        """Its state's name; vacant where nothing is known of it."""
        place = self.place_of.get(key)
        return "vacant" if place is None else self.machine.state(place)

    def is_on_its_way(self, key: str) -> bool:
        """Somebody waits for it, or a worker has it."""
        return self.state(key) in ("queued", "compiling", "ending")

    def fire(self, event: str, key: str, msg: object = None) -> None:
        """One event of a key; a key without a place gets one."""
        place = self.place_of.get(key)
        if place is None:
            place = int(self.machine.within("vacant")[0])
            self.place_of[key], self._keys[place] = place, key
        self.machine.fire(self._events[event], np.array([place]), msg)

    def overdue(self, now_s: float) -> list[str]:
        """Keys whose time is over."""
        return [key for key, due_s in self.due_s.items() if due_s <= now_s]

    def job_of(self, key: str) -> int:
        """The number of the key's job."""
        return next(job for job, busy in self.jobs.items() if busy == key)

    # -- guards and actions of specs/grammar_key.toml -------------------------------------------

    def is_wanted(self, places: Places, msg: object) -> NDArray[np.bool_]:
        """Somebody has come while its worker was being ended."""
        return np.array([self._keys[place] in self.waiting for place in places.tolist()])

    def enter_queue(self, places: Places, at: Places, msg: object) -> None:
        """Behind all others."""
        for key in self._named(places):
            self.refusals.pop(key, None)
            self.queue.append(key)

    def leave_queue(self, places: Places, at: Places, msg: object) -> None:
        """A worker has it, or nobody wants it."""
        for key in self._named(places):
            self.queue.remove(key)

    def tell_late(self, places: Places, at: Places, msg: object) -> None:
        """All who wait hear it. A time-out says nothing about the grammar, and is never remembered."""
        for key in self._named(places):
            self.due_s.pop(key)
            for slot in self.waiting.pop(key, {}).values():
                self._tell(slot, GrammarTimedOut(str(msg)))

    def end_job(self, places: Places, at: Places, msg: object) -> None:
        """Its worker can only be killed."""
        for key in self._named(places):
            self._kill(self.job_of(key))

    def remember(self, places: Places, at: Places, msg: Refusal) -> None:
        """The next who ask get the same answer."""
        for key in self._named(places):
            self.refusals[key] = msg

    def forget(self, places: Places, at: Places, msg: object) -> None:
        """Nothing is known of the key."""
        for key, place in zip(self._named(places), places.tolist(), strict=True):
            self.refusals.pop(key, None)
            self.due_s.pop(key, None)
            del self.place_of[key]
            self._keys[place] = ""

    def _named(self, places: Places) -> list[str]:
        return [self._keys[place] for place in places.tolist()]

    # -- invariants ------------------------------------------------------------------------------

    def waiting_is_sound(self) -> bool:
        """GK1, and each who waits will be answered: by a result or at a known time."""
        held = {key: self.machine.state(place) for key, place in self.place_of.items()}
        queued = [key for key, state in held.items() if state == "queued"]
        return (
            sorted(queued) == sorted(self.queue)
            and all(self.waiting.values())
            and all(held.get(key) in ("queued", "compiling", "ending") for key in self.waiting)
            and self.waiting.keys() <= self.due_s.keys()
            and all(key in self.waiting for key in queued)
            and all((held.get(key) == "refused") for key in self.refusals)
        )

    # -- for the search --------------------------------------------------------------------------

    def snapshot(self) -> tuple[Any, ...]:
        """All of it as a hashable."""
        waiting = tuple((key, tuple(slots.items())) for key, slots in self.waiting.items())
        return (
            self.machine.snapshot(),
            tuple(self._keys),
            waiting,
            tuple(self.queue),
            tuple(self.due_s.items()),
            tuple(self.jobs.items()),
            tuple(self.refusals.items()),
        )

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        states, keys, waiting, queue, due_s, jobs, refusals = taken
        self.machine.restore(states)
        self._keys = list(keys)
        self.place_of = {key: place for place, key in enumerate(keys) if key}
        self.waiting = {key: dict(slots) for key, slots in waiting}
        self.queue = list(queue)
        self.due_s, self.jobs, self.refusals = dict(due_s), dict(jobs), dict(refusals)
