"""What the probes are told, in specs/health.toml: no inference is needed for an answer."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.actors.core import Core, Reply
from engine.messages import Probe, RankDown, RankUp, Snapshot, Vitals

OLDEST_S = 5.0
"""A snapshot may be so old, or three of its periods where that is more."""

AHEAD_S = 1.0
"""A wall clock may be so far ahead."""


class Health(Core):
    """Core of specs/health.toml.

    ranks       ranks that the server was started with
    snapshot_s  seconds between two snapshots of a rank

    started  ranks that are up       lost    the rank that ended first, -1 where none did
    newest   wall-clock time of the newest snapshot by rank
    """

    SPEC: ClassVar[str] = "health"
    DATA: ClassVar[tuple[str, ...]] = ("started", "lost", "newest")

    def __init__(self, ranks: int, snapshot_s: float) -> None:
        super().__init__()
        self.ranks = ranks
        self.oldest_s = max(OLDEST_S, 3 * snapshot_s)
        self.started: set[int] = set()
        self.lost = -1
        self.newest: dict[int, float] = {}

    # ---- guards -------------------------------------------------------------------------------

    def is_the_last_to_start(self, msg: RankUp) -> bool:
        """All others are up."""
        return len(self.started | {msg.rank}) == self.ranks

    # ---- actions ------------------------------------------------------------------------------

    def count_start(self, msg: RankUp) -> None:
        """The rank is up."""
        self.started.add(msg.rank)

    def note_loss(self, msg: RankDown) -> None:
        """The cause that probes are told."""
        self.lost = msg.rank

    def keep(self, msg: Snapshot) -> None:
        """The rank lives."""
        self.newest[msg.rank] = msg.wall_s

    def say_starting(self, msg: Probe) -> None:
        """Not yet."""
        self._answer(msg, "starting", "the model is loading")

    def say_up(self, msg: Probe) -> None:
        """Yes, as far as the ranks are fresh."""
        self._answer(msg, "", "")

    def say_lost(self, msg: Probe) -> None:
        """No more."""
        self._answer(msg, "rank_lost", f"rank {self.lost} has ended")

    def say_draining(self, msg: Probe) -> None:
        """No more."""
        self._answer(msg, "shutting_down", "the server is shutting down")

    def _answer(self, msg: Probe, code: str, refused: str) -> None:
        ages: dict[int, float] = {}
        found = []
        for rank in range(self.ranks):
            age_s, fault, text = self._look(rank, msg)
            if age_s is not None:
                ages[rank] = age_s
            if fault:
                found.append((rank, fault, text))
        stale = tuple(f"rank {rank} {text}" for rank, _, text in found)
        faults = tuple((rank, fault) for rank, fault, _ in found)
        self.emit(Reply(msg.slot, Vitals(refused, tuple(ages.items()), stale, code, faults)))

    def _look(self, rank: int, msg: Probe) -> tuple[float | None, str, str]:
        """(age of the newest sign of life, kind of fault, its text) of a rank; empty texts: it is fresh."""
        newest = self.newest.get(rank)
        if msg.beats or msg.pids:
            own = [beat for beat in msg.beats if beat.slot == rank and not beat.torn]
            if any(beat.slot == rank and beat.torn for beat in msg.beats):
                return None, "unreadable", "has a snapshot that can't be read"
            strangers = [beat for beat in msg.beats if beat.rank == rank and beat.slot != rank]
            pid = dict(msg.pids).get(rank, 0)
            if strangers or any(beat.rank != rank or (pid and beat.pid != pid) for beat in own):
                return None, "duplicate", "has snapshots of two processes"
            newest = own[0].wall_s if own else None
        if newest is None:
            return None, "missing", "has sent no snapshot"
        age_s = msg.wall_s - newest
        if age_s < -AHEAD_S:
            return (
                age_s,
                "future",
                f"sent a snapshot {-age_s:.1f} s ahead of the clock",
            )
        if age_s > self.oldest_s:
            return (
                age_s,
                "stale",
                f"sent its snapshot {age_s:.1f} s ago, at most {self.oldest_s:.1f} may be",
            )
        return age_s, "", ""


def readiness_is_true(world: Any) -> bool:
    """H1: up means that every rank has started and none was seen to end; another state has its cause."""
    core = world.cores["health"]
    complete = len(core.started) == core.ranks
    if core.state == "up":
        return bool(complete and core.lost < 0)
    return core.state != "starting" or not complete
