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
        self._answer(msg, "the model is loading")

    def say_up(self, msg: Probe) -> None:
        """Yes, as far as the ranks are fresh."""
        self._answer(msg, "")

    def say_lost(self, msg: Probe) -> None:
        """No more."""
        self._answer(msg, f"rank {self.lost} has ended")

    def say_draining(self, msg: Probe) -> None:
        """No more."""
        self._answer(msg, "the server is shutting down")

    def _answer(self, msg: Probe, refused: str) -> None:
        ages = tuple((rank, msg.wall_s - self.newest[rank]) for rank in sorted(self.newest))
        self.emit(Reply(msg.slot, Vitals(refused, ages, tuple(self._stale(dict(ages))))))

    def _stale(self, ages: dict[int, float]) -> list[str]:
        """One line for each rank that isn't known to live."""
        lines = []
        for rank in range(self.ranks):
            if rank not in ages:
                lines.append(f"rank {rank} has sent no snapshot")
            elif not -AHEAD_S <= ages[rank] <= self.oldest_s:
                age = f"{ages[rank]:.1f} s old, at most {self.oldest_s:.1f} are allowed"
                lines.append(f"rank {rank}'s snapshot is {age}")
        return lines


def readiness_is_true(world: Any) -> bool:
    """H1: up means that every rank has started and none was seen to end; another state has its cause."""
    core = world.cores["health"]
    complete = len(core.started) == core.ranks
    if core.state == "up":
        return bool(complete and core.lost < 0)
    return core.state != "starting" or not complete
