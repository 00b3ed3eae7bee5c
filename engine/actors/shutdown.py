"""The shutdown coordinator: what ends when, in specs/shutdown.toml. It decides; the launcher acts."""

from __future__ import annotations

from typing import ClassVar

from engine.actors.core import Core, Send
from engine.actors.core import Stop as Ended
from engine.actors.ingress import rank_name
from engine.messages import CloseServer, Drain, KillRanks, PhaseBegan, RankEnded, Signalled, Stop

REASON = "the server is shutting down"

CLEAN, CRASHED, FORCED = 0, 1, 3
"""Exit codes: every rank ended by itself and well; one didn't; none failed, but some had to be killed."""


class Shutdown(Core):
    """Core of specs/shutdown.toml.

    ranks              ranks that were started
    drain_ms, stop_ms  how long requests may go on, and how long ranks may take to end

    codes    exit codes of the ranks that have ended     signals  that came so far
    steps    orders that were given, in their order
    """

    SPEC: ClassVar[str] = "shutdown"
    DATA: ClassVar[tuple[str, ...]] = ("codes", "signals", "steps")

    def __init__(self, ranks: int, drain_ms: float, stop_ms: float) -> None:
        super().__init__()
        self.ranks = ranks
        self.drain_ms = drain_ms
        self.stop_ms = stop_ms
        self.codes: dict[int, int] = {}
        self.signals = 0
        self.steps: list[str] = []

    # ---- guards -------------------------------------------------------------------------------

    def is_third(self, msg: Signalled) -> bool:
        """The operator has lost patience."""
        return self.signals == 2

    def is_last(self, msg: RankEnded) -> bool:
        """No other rank is left."""
        return len(self.codes.keys() | {msg.rank}) == self.ranks

    # ---- actions ------------------------------------------------------------------------------

    def count_signal(self, msg: Signalled) -> None:
        """One more."""
        self.signals += 1

    def note_end(self, msg: RankEnded) -> None:
        """How a rank ended."""
        self.codes[msg.rank] = msg.code

    def drain(self, msg: object) -> None:
        """From now on new requests are refused, and probes say why."""
        self._begin("drain")
        self.emit(Send("health", Drain()))
        self.emit(Send("ingress", Drain()))

    def stop_all(self, msg: object) -> None:
        """Requests end first, so that each client hears why; then the ranks that are left."""
        self._begin("stop")
        self.emit(Send("ingress", Stop(REASON)))
        for rank in range(self.ranks):
            if rank not in self.codes:
                self.emit(Send(rank_name(rank), Stop(REASON)))

    def kill(self, msg: object) -> None:
        """The ranks that are left had their time."""
        self._begin("kill")
        self.emit(Send("launcher", KillRanks()))

    def close(self, msg: object) -> None:
        """The server ends; 0 only where every rank ended by itself and well."""
        self._begin("close")
        code = CRASHED if any(self.codes.values()) else FORCED if "kill" in self.steps else CLEAN
        self.emit(Send("launcher", CloseServer(code)))
        self.emit(Ended("closed"))

    def _begin(self, step: str) -> None:
        self.steps.append(step)
        self.emit(Send("launcher", PhaseBegan(step)))

    # ---- invariants ---------------------------------------------------------------------------

    def ends_in_order(self) -> bool:
        """I8, for this actor's part: drain, stop, kill where ranks are left, close."""
        order = ["drain", "stop", "kill", "close"]
        placed = [order.index(step) for step in self.steps]
        if placed != sorted(set(placed)):
            return False
        if self.state != "closed":
            return "kill" not in self.steps and "close" not in self.steps
        return "close" in self.steps and ("kill" in self.steps) == (len(self.codes) < self.ranks)

    def third_signal_ends_it(self) -> bool:
        """Whoever has signalled twice is not kept waiting a third time."""
        return self.signals <= 2
