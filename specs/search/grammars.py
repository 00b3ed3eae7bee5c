"""The world of compiled grammars in searches: workers that compile, refuse, crash, and requests."""

from __future__ import annotations

from typing import Any

from engine.actors.core import Reply
from engine.actors.grammar import Grammars
from engine.actors.grammar_keys import GrammarLimits
from engine.fsm.environment import Environment, From
from engine.grammar.cache import ENTRY_BYTES
from engine.messages import (
    GrammarBroken,
    GrammarBuilt,
    GrammarCompile,
    GrammarLeft,
    GrammarReady,
    GrammarUnfit,
    GrammarWanted,
    Tick,
)

SIZE = 10
"""Bytes of a grammar; its key has one."""

LATE_S = 100.0
"""Whatever was asked for before is over."""


def grammars(workers: int = 1, queued: int = 1, entries: int = 1, refusals: int = 1) -> Grammars:
    """A core whose memory is bounded by bytes just as by entries."""
    room = entries * (ENTRY_BYTES + SIZE + 1)
    return Grammars(GrammarLimits(workers, queued, room, entries, refusals, 50.0, 60.0))


class Compilers(Environment):
    """Workers, and requests that come, use what they get, and leave.

    requests  (key, when it comes) of each; its ticket is its place      may_leave  those that may leave early
    bad       keys that the library refuses                  crashes  how many jobs may end without a result

    asked    requests that came                  gone     those that left, early or after use
    answers  what each got, by ticket            hold     those that use a grammar
    jobs     job -> key of what workers have     ended    jobs whose worker was told to end
    refused  keys that were found to be bad      again    keys that were compiled after that
    """

    DATA = ("asked", "gone", "answers", "hold", "jobs", "ended", "refused", "again", "crashes")

    def __init__(
        self, requests: list[Any], may_leave: list[int] | None = None, bad: str = "", crashes: int = 0
    ) -> None:
        self.requests = tuple((key, now_s) for key, now_s in requests)
        self.may_leave = tuple(may_leave or ())
        self.bad = bad
        self.crashes = crashes
        self.asked: set[int] = set()
        self.gone: set[int] = set()
        self.answers: dict[int, str] = {}
        self.hold: set[int] = set()
        self.jobs: dict[int, str] = {}
        self.ended: set[int] = set()
        self.refused: set[str] = set()
        self.again: set[str] = set()

    def observe(self, sender: str, effect: Any) -> list[Any]:
        if isinstance(effect, Reply):
            self._answered(effect.slot, effect.value)
        elif isinstance(effect.msg, GrammarCompile):
            key = effect.msg.key
            assert key not in self.jobs.values(), "I4: two compiles of one key"
            self.jobs[effect.msg.job] = key
            self.again |= self.refused & {key}
        elif effect.msg.job in self.jobs:
            self.ended.add(effect.msg.job)
        return []

    def _answered(self, ticket: int, value: Any) -> None:
        assert ticket not in self.answers, f"{ticket} is answered twice"
        if isinstance(value, GrammarReady):
            self.answers[ticket] = f"got {value.value}"
            if ticket not in self.gone:
                self.hold.add(ticket)
        else:
            self.answers[ticket] = type(value).__name__

    def choices(self) -> list[Any]:
        found: list[Any] = [("ask", one) for one in range(len(self.requests)) if one not in self.asked]
        for job, key in self.jobs.items():
            done = "refuse" if key in self.bad else "build"
            # The answer may have been on its way when the order to end it came.
            found += [("end", job), (done, job)] if job in self.ended else [(done, job)]
        return found + [("leave", ticket) for ticket in sorted(self.hold)]

    def faults(self) -> list[Any]:
        crash = [("crash", job) for job in self.jobs] if self.crashes else []
        return crash + [
            ("leave", one) for one in self.may_leave if one in self.asked and one not in self.gone
        ]

    def choose(self, choice: Any) -> list[Any]:
        kind, which = choice
        if kind == "ask":
            self.asked.add(which)
            key, now_s = self.requests[which]
            return [From(f"api{which}", "grammar", GrammarWanted(key, which, now_s, which))]
        if kind == "leave":
            self.gone.add(which)
            self.hold.discard(which)
            return [From(f"api{which}", "grammar", GrammarLeft(which))]
        key = self.jobs.pop(which)
        self.ended.discard(which)
        if kind == "build":
            return [From("compilers", "grammar", GrammarBuilt(which, key, SIZE, "compile"))]
        if kind == "refuse":
            self.refused.add(key)
            return [From("compilers", "grammar", GrammarUnfit(which, "bad", 10.0))]
        self.crashes -= kind == "crash"
        what = "crashed" if kind == "crash" else "killed"
        return [From("compilers", "grammar", GrammarBroken(which, what, ""))]


def late() -> Tick:
    """The time at which every compile is overdue and every refusal forgotten."""
    return Tick(LATE_S)


def who_left_is_forgotten(world: Any) -> bool:
    """A request that left, and whose word of it has arrived, neither waits nor pins anything."""
    grammar, flying = world.cores["grammar"], {getattr(msg, "ticket", None) for _, _, msg in world.in_flight}
    return not (world.environment.gone - flying) & (grammar.waits.keys() | grammar.reads.keys())


def answers_are_true(world: Any) -> bool:
    """Who got a grammar got its key's; who was refused asked for a key that the library refuses."""
    environment = world.environment
    for ticket, answer in environment.answers.items():
        key = environment.requests[ticket][0]
        if answer == "GrammarRefused" and key not in environment.refused:
            return False
        if answer.startswith("got ") and answer != f"got {key}":
            return False
    return True


def there_is_room(world: Any) -> bool:
    """Of a search with room for every key: nobody is turned away."""
    return "QueueFull" not in world.environment.answers.values()


def refusals_are_remembered(world: Any) -> bool:
    """Of a search that ends within that time: a key that was refused is not compiled again."""
    return not world.environment.again


def nobody_waits(world: Any) -> bool:
    """At the end: each request has its answer or has left, no worker is busy, nothing is pinned."""
    grammar = world.cores["grammar"]
    unanswered = world.environment.asked - world.environment.answers.keys() - world.environment.gone
    return not (unanswered or grammar.waits or grammar.reads or grammar.keys.jobs or grammar.keys.due_s)
