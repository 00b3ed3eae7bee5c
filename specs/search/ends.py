"""The world of a whole end: the edge's ranks and clients, ended by shutdown coordinator and launcher."""

from __future__ import annotations

from typing import Any

from engine.actors.core import Stop as Left
from engine.fsm.environment import From
from engine.messages import (
    ABORTED,
    CloseServer,
    Drain,
    KillRanks,
    PhaseBegan,
    RankDown,
    RankEnded,
    RequestFailed,
    Stop,
)
from specs.search.edge import Edge, one_terminal_event

DEAD = 2


class Ends(Edge):
    """As Edge, with ranks that are up, and end when they are told to.

    told    ranks that have heard the order and ended their requests
    killed  the launcher kills what is left     closed  exit code of the server, -1 while it is open
    """

    DATA = (*Edge.DATA, "told", "killed", "closed")

    def __init__(self, ranks: int, leaves: int = 0, deaths: int = 0) -> None:
        super().__init__(ranks, leaves, deaths)
        self.life = [1] * ranks
        self.told: set[int] = set()
        self.killed = False
        self.closed = -1

    def observe(self, sender: str, effect: Any) -> list[Any]:
        if isinstance(effect, Left):
            return []
        msg = getattr(effect, "msg", None)
        if isinstance(msg, KillRanks):
            self.killed = True
        elif isinstance(msg, CloseServer):
            assert self.closed < 0, "the server is closed twice"
            assert self.killed or all(life == DEAD for life in self.life), "a rank is left alone"
            self.closed = msg.code
        elif not isinstance(msg, (PhaseBegan, Drain)):
            return super().observe(sender, effect)
        return []

    def choices(self) -> list[Any]:
        gone = [("gone", rank) for rank, life in enumerate(self.life) if life != DEAD and self._ends(rank)]
        return super().choices() + gone

    def _ends(self, rank: int) -> bool:
        return self.killed or rank in self.told

    def choose(self, choice: Any) -> list[Any]:
        kind, which = choice
        if kind not in ("die", "gone"):
            return super().choose(choice)
        self.deaths -= kind == "die"
        self.life[which] = DEAD
        self.inbox[which].clear()
        self.running[which].clear()
        code = 0 if kind == "gone" and not self.killed else -9
        return [
            From("launcher", "ingress", RankDown(which, "killed")),
            From("launcher", "shutdown", RankEnded(which, code)),
        ]

    def _take(self, rank: int) -> list[Any]:
        if not isinstance(self.inbox[rank][0], Stop):
            return super()._take(rank)
        self.inbox[rank].pop(0)
        self.told.add(rank)
        ended, self.running[rank] = self.running[rank], {}
        return [From(f"rank{rank}", "detok", RequestFailed(one, ABORTED, 503, "stopping")) for one in ended]


def every_client_hears_one_end(world: Any) -> bool:
    """I11, I8: at the end every request has its terminal event; without ranks the server is closed."""
    dead = all(life == DEAD for life in world.environment.life)
    return one_terminal_event(world) and dead == (world.environment.closed >= 0)
