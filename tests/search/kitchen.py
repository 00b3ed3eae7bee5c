"""What stands round the ovens of the example: a heater that may repeat itself or fall silent."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.actors.core import Run, Send
from engine.fsm.environment import Environment
from tests.specs.data.oven import Baked


class Heater(Environment):
    """Answers each Run with one Baked; up to `repeats` old answers come again; may break if `breaks`."""

    DATA: ClassVar[tuple[str, ...]] = ("jobs", "answered", "left", "broken")

    def __init__(self, repeats: int = 0, breaks: bool = False) -> None:
        self.breaks = breaks
        self.jobs: list[tuple[str, int]] = []
        self.answered: list[tuple[str, int]] = []
        self.left = repeats
        self.broken = False

    def observe(self, sender: str, effect: Any) -> list[Any]:
        if isinstance(effect, Run):
            self.jobs.append((sender, effect.job))
        return []

    def choices(self) -> list[Any]:
        return [] if self.broken else [("bake", *job) for job in self.jobs]

    def faults(self) -> list[Any]:
        again = [("repeat", *job) for job in self.answered] if self.left else []
        return again + ([("break",)] if self.breaks and not self.broken else [])

    def choose(self, choice: Any) -> list[Any]:
        if choice[0] == "break":
            self.broken = True
            return []
        _, oven, number = choice
        if choice[0] == "repeat":
            self.left -= 1
        else:
            self.jobs.remove((oven, number))
            self.answered.append((oven, number))
        return [Send(oven, Baked(number))]


def every_tray_is_out(world: Any) -> bool:
    """At the end: no tray is left in a queue or an oven."""
    return all(core.current < 0 and not core.queue for core in world.cores.values())
