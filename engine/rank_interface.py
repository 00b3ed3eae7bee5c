"""What a rank's process is told, and what a rank is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.actors.core import Core
from engine.actors.device import Device, StepRunner
from engine.actors.links import Ref
from engine.actors.mailbox import Mailbox
from engine.actors.timers import Timers
from engine.config import Settings
from engine.messages import StepDone


class Told(msgspec.Struct):
    """What a rank's process reads from its standard input.

    peers    descriptor of the link to each other rank, where links carry the exchange
    session  of the exchange, where one carries it, the same on every rank: of the native one its id, of the
             collective one the file where the ranks meet
    meeting  folder of the files by which the ranks' process groups find each other; empty: there are none
    board    descriptor of the file of loads, -1 where nobody reads them
    pulse    descriptor of the file of signs of life, -1 where nobody reads them
    box      descriptor of the file of this rank's last words, -1: they go to standard error
    """

    rank: int
    settings: Settings
    peers: dict[int, int] = {}
    session: str = ""
    meeting: str = ""
    board: int = -1
    pulse: int = -1
    box: int = -1


class Parts(Protocol):
    """What a rank is made of; tests put a runner without a model in its place."""

    def place(self, rank: int, meeting: str) -> None:
        """Called first: which rank this is, and the folder where its process groups meet (empty: none)."""

    def load(self, settings: Settings, say: Callable[[str], None]) -> StepRunner:
        """On the device thread: whatever takes long. `say` prints progress."""

    def device(
        self, load: Callable[[], StepRunner], deliver: Callable[[StepDone], None], timers: Timers
    ) -> Device:
        """What runs the steps."""

    def matchers(self, settings: Settings, runner: StepRunner, mailbox: Mailbox, timers: Timers) -> Ref:
        """On the loop thread: the actor `matchers`, whose answers go to the rank's mailbox."""

    def wall_s(self) -> float:
        """The wall clock, which snapshots carry."""

    def settle(self) -> None:
        """Called once when everything is loaded, before the first request."""

    def dump(self) -> None:
        """Called when the rank has stalled: shows where every thread stands."""

    def core(self, settings: Settings, rank: int, runner: StepRunner) -> Core:
        """On the loop thread: a fresh core, from what the runner says of itself."""

    async def release(self, part: str) -> None:
        """Lets go of `graphs`, `caches` or `groups`, in this order, when no step runs any more."""
