"""Who sends what to whom, as the running processes use it: mailboxes, unions of links, allowed sends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import engine.messages
from engine.actors.mailbox import Full, Mailbox
from engine.actors.merge import merge_of
from engine.fsm.load import spec_named
from engine.fsm.owners import SPECS
from engine.fsm.system import System, load_system
from engine.messages import Message

FILE = "system.toml"


@dataclass(frozen=True, slots=True)
class Wiring:
    """specs/system.toml in force.

    system  checked: complete, and free of waiting circles
    digest  SHA-256 over every file of specs/ that decides behaviour: what `Hello` compares
    """

    system: System
    digest: str

    @property
    def receivers(self) -> tuple[str, ...]:
        """All kinds of actors, in the order in which frames number them."""
        return tuple(sorted(self.system.actors))

    def mailbox(self, name: str) -> Mailbox:
        """An empty mailbox for the actor `name`."""
        actor = self.system.actors[kind_of(name)]
        full: Full = "reject" if actor.full == "reject" else "wait" if actor.full == "wait" else "merge"
        return Mailbox(name, actor.mailbox, full, merge_of(actor.merge))

    def waits(self, process: str) -> bool:
        """Whether an actor of this kind of process makes its senders wait."""
        return any(actor.full == "wait" for actor in self.system.actors.values() if actor.process == process)

    def held_by(self, process: str) -> tuple[str, ...]:
        """The kinds of actors that live in this kind of process."""
        return tuple(name for name, actor in self.system.actors.items() if actor.process == process)

    def accepts(self, process: str) -> dict[str, tuple[type[Message], ...]]:
        """Of each kind of actor in `process`: the message types that come to it from other processes."""
        actors = self.system.actors
        found: dict[str, set[str]] = {}
        for link in self.system.links:
            # A rank's peer is of its own kind, and lives in another process of that kind.
            elsewhere = actors[link.sender].process != process or link.sender == link.receiver
            if actors[link.receiver].process == process and elsewhere:
                found.setdefault(link.receiver, set()).update(link.messages)
        return {kind: tuple(_message(name) for name in sorted(names)) for kind, names in found.items()}

    def sends_of(self, name: str) -> Callable[[str, type], bool]:
        """Whether the actor `name` may send this message type to the actor of that name."""
        sender = kind_of(name)
        allowed = {
            (link.receiver, _message(message))
            for link in self.system.links
            if link.sender == sender
            for message in link.messages
        }
        known: dict[tuple[str, type], bool] = {}

        def may_send(to: str, kind: type) -> bool:
            answer = known.get((to, kind))
            if answer is None:
                answer = known[to, kind] = (kind_of(to), kind) in allowed
            return answer

        return may_send


def kind_of(name: str) -> str:
    """The kind of an actor: its name without the number at its end (rank0 is a rank)."""
    return name.rstrip("0123456789")


@cache
def wiring() -> Wiring:
    """The wiring of this installation; loads and checks every machine. Raises SpecError."""
    names = [path.stem for path in sorted(SPECS.glob("*.toml")) if path.name != FILE]
    specs = {name: spec_named(name) for name in names}
    return Wiring(load_system(SPECS / FILE, specs, engine.messages), digest_of(SPECS))


def digest_of(folder: Path) -> str:
    """SHA-256 over the names and bytes of all *.toml files right in this folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.toml")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _message(name: str) -> type[Message]:
    found: type[Message] = getattr(engine.messages, name)
    return found
