"""The example machine of the tests: small, with a queue, a deferral, a time-out and an event of its own."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from engine.actors.core import Core, Run, Send, Stop


class Tray(msgspec.Struct, frozen=True):
    """Baker -> oven."""

    number: int


class Baked(msgspec.Struct, frozen=True):
    """Heater -> oven."""

    number: int


class SwitchOff(msgspec.Struct, frozen=True):
    """Baker -> oven."""


class Oven(Core):
    """Bakes trays one at a time."""

    SPEC = "oven"
    DATA = ("current", "queue", "done")
    MESSAGES = sys.modules[__name__]

    def __init__(self, room: int = 1, baker: str = "baker") -> None:
        super().__init__()
        self.room = room
        self.baker = baker
        self.current = -1
        self.queue: list[int] = []
        self.done: list[int] = []

    def has_room(self, msg: Tray) -> bool:
        return len(self.queue) < self.room

    def is_current(self, msg: Baked) -> bool:
        return msg.number == self.current

    def is_old(self, msg: Baked) -> bool:
        return msg.number in self.done

    def heat(self, msg: Tray) -> None:
        self.current = msg.number
        self.emit(Run(msg.number))

    def queue_tray(self, msg: Tray) -> None:
        self.queue.append(msg.number)

    def hand_out(self, msg: Baked) -> None:
        self.done.append(msg.number)
        self.current = -1
        self.emit(Send(self.baker, msg))

    def look_for_next(self, msg: Baked) -> None:
        if self.queue:
            self.post("Next")

    def heat_queued(self, msg: None) -> None:
        self.heat(Tray(self.queue.pop(0)))

    def say_off(self, msg: Any) -> None:
        self.emit(Stop("off"))

    def handed_out_in_order(self) -> bool:
        return self.done == sorted(set(self.done))

    def queue_is_full_before_trays_wait(self) -> bool:
        return len(self.queue) == self.room or not any(isinstance(msg, Tray) for msg in self.waiting)


def one_oven_a_tray(world: Any) -> bool:
    """O2."""
    current = [core.current for core in world.cores.values() if core.current >= 0]
    return len(current) == len(set(current))
