"""The world of ranks that end together: their schedulers, what they hold, their barrier, the operator."""

from __future__ import annotations

from typing import Any

from engine.actors.core import Stop as Left
from engine.fsm.environment import Environment, From
from engine.messages import (
    CloseServer,
    CoreEnded,
    Drain,
    Drained,
    KillRanks,
    PeersMet,
    RankEnded,
    Released,
    ReleasePart,
    Stop,
)

SERVES, RELEASES, GONE = range(3)


class Ends(Environment):
    """Ranks whose schedulers stop together, let go, and end.

    crashes  how many ranks may be killed at any moment    faults_left  how many releases may fail
    life     of each rank       told    ranks that were told to stop
    parts    what each rank is letting go of, empty: nothing
    killed   the launcher kills what is left
    closed   exit code, -1 while open
    drains   ingress still has to say that nothing is left
    """

    DATA = ("life", "told", "killed", "parts", "closed", "drains", "crashes", "faults_left")

    def __init__(self, ranks: int, crashes: int = 0, faults: int = 0) -> None:
        self.crashes, self.faults_left = crashes, faults
        self.life = [SERVES] * ranks
        self.parts = [""] * ranks
        self.told: set[int] = set()
        self.killed = self.drains = False
        self.closed = -1

    def is_gone(self, name: str) -> bool:
        """Whether the process of this release core has ended."""
        return self.life[int(name[7:])] == GONE

    def observe(self, sender: str, effect: Any) -> list[Any]:
        if isinstance(effect, Left):
            if sender.startswith("release") and not self.is_gone(sender):
                return self._end(int(sender[7:]), 1 if effect.reason else 0)
            return []
        msg = effect.msg
        if isinstance(msg, ReleasePart):
            self.parts[int(sender[7:])] = msg.part
        elif isinstance(msg, Stop) and effect.to.startswith("rank"):
            self.told.add(int(effect.to[4:]))
        elif effect.to == "ingress":
            self.drains = isinstance(msg, Drain)
        elif isinstance(msg, KillRanks):
            self.killed = True
        elif isinstance(msg, CloseServer):
            assert self.killed or all(life == GONE for life in self.life), "a rank is left alone"
            self.closed = msg.code
        return []

    def _end(self, rank: int, code: int) -> list[Any]:
        self.life[rank], self.parts[rank] = GONE, ""
        return [From("launcher", "shutdown", RankEnded(rank, code))]

    def _met(self, rank: int) -> bool:
        later = ("barrier", "groups")
        return all(life == GONE or part in later for life, part in zip(self.life, self.parts, strict=True))

    def choices(self) -> list[Any]:
        found: list[Any] = [("drained", 0)] if self.drains else []
        for rank, life in enumerate(self.life):
            agreed = all(other == GONE or peer in self.told for peer, other in enumerate(self.life))
            if life == SERVES and rank in self.told and (agreed or GONE in self.life):
                found.append(("core ends", rank))
            if self.parts[rank] and (self.parts[rank] != "barrier" or self._met(rank)):
                found.append(("part done", rank))
            if life != GONE and self.killed:
                found.append(("end", rank))
        return found

    def faults(self) -> list[Any]:
        found: list[Any] = []
        for rank, life in enumerate(self.life):
            if life != GONE and self.crashes:
                found.append(("crash", rank))
            if self.parts[rank] not in ("", "barrier") and self.faults_left:
                found.append(("part fails", rank))
            if life == SERVES and GONE in self.life:
                found.append(("core fails", rank))
        return found

    def choose(self, choice: Any) -> list[Any]:
        kind, rank = choice
        name = f"release{rank}"
        if kind == "drained":
            self.drains = False
            return [From("ingress", "shutdown", Drained())]
        if kind in ("core ends", "core fails"):
            self.life[rank] = RELEASES
            return [From(f"loader{rank}", name, CoreEnded(kind == "core ends"))]
        if kind in ("part done", "part fails"):
            part, self.parts[rank] = self.parts[rank], ""
            self.faults_left -= kind == "part fails"
            fault = "" if kind == "part done" else "an illegal address"
            return [From(f"parts{rank}", name, PeersMet() if part == "barrier" else Released(fault))]
        self.crashes -= kind == "crash"
        return self._end(rank, -9)


def all_is_over(world: Any) -> bool:
    """At the end: a server that was told to end has closed, with the code that its ranks give it."""
    environment, codes = world.environment, world.cores["shutdown"].codes
    if environment.closed < 0:
        return not environment.told
    if any(life != GONE for life in environment.life):
        return False
    early = any(codes.values())
    return bool(environment.closed == (1 if early else 3 if environment.killed else 0))
