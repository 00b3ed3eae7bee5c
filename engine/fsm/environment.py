"""What stands for the rest of the world in a search: the device, clients, links, faults."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from engine.fsm.freeze import freeze, thaw


class From(NamedTuple):
    """A message from a named process of the environment; order is kept for each sender and receiver."""

    sender: str
    to: str
    msg: Any


class Environment:
    """Base of a search's environment: nothing happens, effects vanish. Subclasses override what they need.

    DATA  names of the fields that change, as for cores
    """

    DATA: ClassVar[tuple[str, ...]] = ()

    def observe(self, sender: str, effect: Any) -> list[Any]:
        """At emission: a Run, Reply or Stop of a core, or a Send to no core. Returns Sends or Froms."""
        return []

    def choices(self) -> list[Any]:
        """What it may do now and, if nothing else happens, will do; hashable values, each shown in a run."""
        return []

    def faults(self) -> list[Any]:
        """As `choices`, of things that may also never happen."""
        return []

    def choose(self, choice: Any) -> list[Any]:
        """Does it. Returns Sends or Froms to cores."""
        return []

    def snapshot(self) -> Any:
        """All DATA as a hashable."""
        return tuple(freeze(getattr(self, name)) for name in self.DATA)

    def restore(self, taken: Any) -> None:
        """Back to a snapshot."""
        for name, frozen in zip(self.DATA, taken, strict=True):
            setattr(self, name, thaw(frozen))
