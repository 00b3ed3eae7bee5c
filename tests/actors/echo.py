"""A core for tests of the runtime, with its own messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from engine.actors.core import Core, Reply, Run, Send
from engine.actors.core import Stop as StopEffect
from engine.messages import Message, RunStep, Stop

__all__ = ["Begin", "Came", "Echo", "Note", "Pass", "Ping", "Poison", "Stop", "Work"]


class Ping(Message, frozen=True):
    """Answered with `value`, unless that is negative."""

    value: int
    slot: Any = None


class Note(Message, frozen=True):
    """Kept, with the loop's time."""

    value: int


class Begin(Message, frozen=True):
    """Arms the time-out."""


class Came(Message, frozen=True):
    """Disarms the time-out."""


class Pass(Message, frozen=True):
    """Sends Note(value) to `to`."""

    to: str
    value: int


class Work(Message, frozen=True):
    """Gives a job out."""

    job: RunStep


class Poison(Message, frozen=True):
    """Makes the core raise."""


class Echo(Core):
    """Keeps what it heard, as (what, when) pairs; `when` comes from the test: cores have no clock."""

    SPEC = "echo"
    DATA = ("heard",)
    MESSAGES: ClassVar[Any] = sys.modules[__name__]

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self.heard: list[tuple[Any, float]] = []
        self.now_s = now_s

    def wants_reply(self, msg: Ping) -> bool:
        return msg.value >= 0

    def answer(self, msg: Ping) -> None:
        self.emit(Reply(msg.slot, msg.value))

    def note(self, msg: Note) -> None:
        self.heard.append((msg.value, self.now_s()))

    def note_late(self, msg: Any) -> None:
        self.heard.append(("late", self.now_s()))

    def send_on(self, msg: Pass) -> None:
        self.emit(Send(msg.to, Note(msg.value)))

    def give_out(self, msg: Work) -> None:
        self.emit(Run(msg.job))

    def raise_error(self, msg: Poison) -> None:
        raise ValueError("poisoned")

    def leave(self, msg: Stop) -> None:
        self.emit(StopEffect(msg.reason))
