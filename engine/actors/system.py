"""Who sends what to whom, as the running processes use it: mailboxes, unions of links, allowed sends.

The file is specs/system.toml; `engine check` proves it complete and free of waiting cycles.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import engine.messages
from engine.actors.mailbox import Full, Mailbox
from engine.actors.merge import merge_of
from engine.errors import SpecError
from engine.fsm.owners import SPECS
from engine.messages import Message


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of actor. `process` is the kind of process that holds it; `size` bounds its mailbox."""

    name: str
    process: str
    size: int
    full: Full
    merge: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class System:
    """The description in memory.

    kinds   by name; an actor's name is its kind's, with a number where there are several (rank0)
    sends   (sender's kind, receiver's kind) -> message types
    digest  SHA-256 over every file of specs/ that decides behaviour: what `Hello` compares
    """

    kinds: Mapping[str, Kind]
    sends: Mapping[tuple[str, str], frozenset[type[Message]]]
    digest: str

    @property
    def receivers(self) -> tuple[str, ...]:
        """All kinds in the order that frames number them."""
        return tuple(sorted(self.kinds))

    def mailbox(self, name: str) -> Mailbox:
        """An empty mailbox for the actor `name`."""
        kind = self.kinds[kind_of(name)]
        return Mailbox(name, kind.size, kind.full, merge_of(kind.merge))

    def accepts(self, process: str) -> dict[str, tuple[type[Message], ...]]:
        """Of each actor kind in `process`: the message types that come to it from other processes."""
        found: dict[str, set[type[Message]]] = {}
        for (sender, receiver), types in self.sends.items():
            inside = self.kinds[receiver].process == process
            if inside and (self.kinds[sender].process != process or sender == receiver):
                found.setdefault(receiver, set()).update(types)
        return {name: tuple(sorted(types, key=lambda t: t.__name__)) for name, types in found.items()}

    def sends_of(self, name: str) -> Callable[[str, type], bool]:
        """Whether the actor `name` may send this message type to the actor of that name."""
        sender = kind_of(name)
        allowed = {to: types for (source, to), types in self.sends.items() if source == sender}
        known: dict[tuple[str, type], bool] = {}

        def may_send(to: str, kind: type) -> bool:
            answer = known.get((to, kind))
            if answer is None:
                answer = known[to, kind] = kind in allowed.get(kind_of(to), ())
            return answer

        return may_send


def kind_of(name: str) -> str:
    """The kind of an actor: its name without the number at its end."""
    return name.rstrip("0123456789")


@cache
def system() -> System:
    """specs/system.toml, read once a process."""
    return read_system(SPECS / "system.toml")


def read_system(path: Path) -> System:
    """The description in this file. Raises SpecError for a message type that doesn't exist."""
    document = tomllib.loads(path.read_text())
    kinds = {name: _kind(name, body) for name, body in document["actors"].items()}
    sends: dict[tuple[str, str], frozenset[type[Message]]] = {}
    for entry in document["sends"]:
        pair = (entry["from"], entry["to"])
        types = frozenset(_message(name, path) for name in entry["messages"])
        sends[pair] = sends.get(pair, frozenset()) | types
    return System(kinds, sends, digest_of(path.parent))


def digest_of(folder: Path) -> str:
    """SHA-256 over the names and bytes of all *.toml files right in this folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.toml")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _kind(name: str, body: dict[str, Any]) -> Kind:
    if re.search(r"\d$", name):
        raise SpecError(
            f"specs/system.toml: actor kind {name} ends in a digit, which numbers actors of a kind"
        )
    return Kind(name, body["process"], body["mailbox"], body["full"], tuple(body.get("merge", ())))


def _message(name: str, path: Path) -> type[Message]:
    found = getattr(engine.messages, name, None)
    if not isinstance(found, type) or not issubclass(found, Message):
        raise SpecError(f"specs/{path.name}: engine/messages.py has no message {name}")
    return found
