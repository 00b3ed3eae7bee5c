"""The world of shutdown coordinator, health and ingress: launcher, ranks, detokenizer, operator."""

from __future__ import annotations

from typing import Any

from engine.actors.core import Reply
from engine.actors.core import Stop as Left
from engine.actors.ingress import Ingress
from engine.fsm.environment import Environment, From
from engine.messages import (
    CloseServer,
    Drain,
    Drained,
    Ended,
    Enqueue,
    Entry,
    KillRanks,
    Probe,
    RankDown,
    RankEnded,
    RankUp,
    RequestFailed,
    Sampling,
    Snapshot,
    Stop,
    Watch,
)

LOADING, UP, ENDED = range(3)


def enqueue() -> Enqueue:
    """One HTTP request."""
    return Enqueue((Entry(1, b"\0\0\0\0", Sampling(1)),), slot="request")


def serving(ranks: int, limit: int) -> Ingress:
    """Ingress of a server whose ranks are up."""
    core = Ingress(ranks, limit)
    for rank in range(ranks):
        core.receive(RankUp(rank))
    return core


def snapshot(rank: int) -> Snapshot:
    """A sign of life."""
    return Snapshot(rank, 1.0, "idle", 0, 0, 1, 1, 1, 1)


def probe() -> Probe:
    """A question at a moment that makes the snapshot fresh."""
    return Probe(2.0, "probe")


class Launch(Environment):
    """Ranks that load, run, and end when they are told to.

    crashes  how many ranks may end by themselves     stuck    how many may ignore the order to end
    endless  whether requests only end when they are ended
    up       whether every rank is up from the start

    life     of each rank                             told     ranks that were told to stop
    deaf     ranks that ignore it                     killed   whether the launcher kills what is left
    live     requests that detokenizer and rank have  closed   exit code that the server was given
    drains   whether an ingress that is no core of the search still has to say that it is drained
    """

    DATA = ("life", "told", "deaf", "killed", "live", "closed", "drains", "crashes", "stuck")

    def __init__(
        self, ranks: int, crashes: int = 0, stuck: int = 0, endless: bool = False, up: bool = False
    ) -> None:
        self.endless = endless
        self.crashes = crashes
        self.stuck = stuck
        self.life = [UP if up else LOADING] * ranks
        self.told: set[int] = set()
        self.deaf: set[int] = set()
        self.killed = False
        self.live: set[int] = set()
        self.closed = -1
        self.drains = False

    def observe(self, sender: str, effect: Any) -> list[Any]:
        if isinstance(effect, (Reply, Left)):
            return []
        msg = effect.msg
        if isinstance(msg, Watch):
            self.live.add(msg.request_id)
        elif isinstance(msg, RequestFailed):
            return self._ended(msg.request_id)
        elif effect.to == "ingress":
            self.drains = isinstance(msg, Drain)
        elif isinstance(msg, Stop) and effect.to != "detok":
            self.told.add(int(effect.to[4:]))
        elif isinstance(msg, KillRanks):
            self.killed = True
        elif isinstance(msg, CloseServer):
            assert self.closed < 0, "the server is closed twice"
            assert self.killed or all(life == ENDED for life in self.life), "a rank is left alone"
            self.closed = msg.code
        return []

    def _ended(self, request_id: int) -> list[Any]:
        """The detokenizer tells ingress once."""
        if request_id not in self.live:
            return []
        self.live.remove(request_id)
        return [From("detok", "ingress", Ended(request_id, 0))]

    def choices(self) -> list[Any]:
        found: list[Any] = [("finish", one) for one in sorted(self.live) if not self.endless]
        if self.drains and not self.endless:
            found.append(("drained", 0))
        for rank, life in enumerate(self.life):
            if life == LOADING and not self.killed:
                found.append(("load", rank))
            if life != ENDED and (self.killed or (rank in self.told and rank not in self.deaf)):
                found.append(("end", rank))
        return found

    def faults(self) -> list[Any]:
        running = [rank for rank, life in enumerate(self.life) if life != ENDED and rank not in self.deaf]
        found = [("crash", rank) for rank in running if self.crashes]
        return found + [("hang", rank) for rank in running if self.stuck]

    def choose(self, choice: Any) -> list[Any]:
        kind, which = choice
        if kind == "finish":
            return self._ended(which)
        if kind == "drained":
            self.drains = False
            return [From("ingress", "shutdown", Drained())]
        if kind == "load":
            self.life[which] = UP
            return [From("launcher", "ingress", RankUp(which)), From("launcher", "health", RankUp(which))]
        if kind == "hang":
            self.stuck -= 1
            self.deaf.add(which)
            return []
        self.crashes -= kind == "crash"
        code = 1 if kind == "crash" else -9 if self.killed else 0
        self.life[which] = ENDED
        return [
            From("launcher", "ingress", RankDown(which)),
            From("launcher", "health", RankDown(which)),
            From("launcher", "shutdown", RankEnded(which, code)),
        ]


def closed_tells_how(world: Any) -> bool:
    """At the end: a server without ranks is closed, with 0 where each ended by itself and well."""
    environment, codes = world.environment, world.cores["shutdown"].codes
    if any(life != ENDED for life in environment.life):
        return bool(environment.closed < 0)
    # Whoever ends behind the order to kill is no crash, and the server has its code by then.
    crashed = any(code > 0 for code in codes.values())
    return bool(environment.closed == (1 if crashed else 3 if environment.killed else 0))


def no_request_is_left(world: Any) -> bool:
    """At the end: a closed server has ended every request."""
    return world.environment.closed < 0 or not world.cores["ingress"].live
