"""How a rank lets go of what it holds, in specs/release.toml: I8 for one rank, and the barrier of all."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.actors.core import Core, Send
from engine.actors.core import Stop as Ended
from engine.messages import CoreEnded, Released, ReleasePart

ORDER = ("graphs", "caches", "barrier", "groups")


class Release(Core):
    """Core of specs/release.toml.

    part_ms, barrier_ms  how long a phase may take

    parts  phases that have begun      done  phases that are complete     fault  why the end is torn
    """

    SPEC: ClassVar[str] = "release"
    DATA: ClassVar[tuple[str, ...]] = ("parts", "done", "fault")

    def __init__(self, part_ms: float, barrier_ms: float) -> None:
        super().__init__()
        self.part_ms = part_ms
        self.barrier_ms = barrier_ms
        self.parts: list[str] = []
        self.done: list[str] = []
        self.fault = ""

    # ---- guards -------------------------------------------------------------------------------

    def is_clean(self, msg: CoreEnded) -> bool:
        """After a failure the device may hang in whatever is asked of it: nothing is."""
        return msg.clean

    def is_whole(self, msg: Released) -> bool:
        """Nothing went wrong."""
        return not msg.fault

    # ---- actions ------------------------------------------------------------------------------

    def release_graphs(self, msg: object) -> None:
        """First phase."""
        self._begin("graphs")

    def release_caches(self, msg: object) -> None:
        """Nothing names them any more."""
        self._begin("caches")

    def wait_for_peers(self, msg: object) -> None:
        """They may still be about to use a group."""
        self._begin("barrier")

    def release_groups(self, msg: object) -> None:
        """Nobody uses them any more."""
        self._begin("groups")

    def finish(self, msg: object) -> None:
        """Everything is gone."""
        self.done.append(self.parts[-1])
        self.emit(Ended(""))

    def give_up(self, msg: object) -> None:
        """The process ends with what it holds; the kernel takes it back."""
        if isinstance(msg, CoreEnded):
            self.fault = "" if msg.clean else "the scheduler failed"
        else:
            cause = msg.fault if isinstance(msg, Released) else "it took too long"
            self.fault = f"{self.parts[-1]}: {cause}"
        self.emit(Ended(self.fault))

    def _begin(self, part: str) -> None:
        if self.parts:
            self.done.append(self.parts[-1])
        self.parts.append(part)
        self.emit(Send("parts", ReleasePart(part)))

    # ---- invariants ---------------------------------------------------------------------------

    def releases_in_order(self) -> bool:
        """I8, for one rank: a prefix of the order, each phase complete before the next."""
        begun = len(self.parts)
        whole = self.state == "ended"
        return (
            self.parts == list(ORDER[:begun])
            and self.done == self.parts[: begun if whole else max(begun - 1, 0)]
            and whole == (self.done == list(ORDER))
        )

    def torn_has_a_cause(self) -> bool:
        """RL2: what ends early says why; after a sound word of each part nothing does."""
        return self.state != "torn" or self.fault.rpartition(": ")[2] != ""


def nobody_is_early(world: Any) -> bool:
    """RL1: behind the barrier means that each rank was there, or has gone."""
    ranks = {name: core for name, core in world.cores.items() if isinstance(core, Release)}
    if not any(core.state in ("groups", "ended") for core in ranks.values()):
        return True
    return all(
        "barrier" in core.parts or core.state == "torn" or world.environment.is_gone(name)
        for name, core in ranks.items()
    )
