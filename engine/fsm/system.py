"""Reads system.toml: the actors, their mailboxes, and who sends what to whom."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from engine.errors import SpecError
from engine.fsm.owners import shown
from engine.fsm.spec import Spec

POLICIES = ("reject", "wait", "merge")


@dataclass(frozen=True)
class Actor:
    """One kind of actor.

    spec     the machine that it runs; None for one without
    process  kind of process that it lives in
    mailbox  most messages that wait; the priority lane isn't counted
    full     reject: the sender gets MailboxFull; wait: the sender waits; merge: messages of one of the types
             in `merge` become one
    """

    name: str
    say: str
    process: str
    mailbox: int
    full: str
    spec: str | None = None
    merge: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """These messages go from one kind of actor to another."""

    sender: str
    receiver: str
    messages: tuple[str, ...]


class Sent(NamedTuple):
    """A message that one kind of actor sends to another, by the name of its struct."""

    sender: str
    receiver: str
    message: str


@dataclass(frozen=True)
class System:
    """The whole of system.toml."""

    actors: dict[str, Actor]
    links: tuple[Link, ...]

    def sends(self) -> set[Sent]:
        """Everything that may be sent."""
        return {Sent(link.sender, link.receiver, name) for link in self.links for name in link.messages}

    def into(self, receiver: str) -> set[str]:
        """Names of all messages that somebody sends to this actor."""
        return {name for link in self.links if link.receiver == receiver for name in link.messages}


def kind_of(name: str) -> str:
    """The kind of an actor: its name without the number at its end (rank0 is a rank)."""
    return name.rstrip("0123456789")


def load_system(path: Path, specs: Mapping[str, Spec], messages: ModuleType) -> System:
    """The system in this file, checked against the machines and the message structs.

    raises  SpecError with every fault found, one a line
    """
    where = shown(path)
    try:
        body = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not TOML: {error}") from error
    faults = [*_unknown("the file", body, ("actors", "sends"), ("actors", "sends"))]
    for name, actor in body.get("actors", {}).items():
        known = ("say", "process", "mailbox", "full", "spec", "merge")
        faults += _unknown(f"actor {name}", actor, known, known[:4])
    for sends in body.get("sends", ()):
        faults += _unknown("a [[sends]]", sends, ("from", "to", "messages"), ("from", "to", "messages"))
    if not faults:
        system = _build(body)
        faults = [*_faults(system, specs, messages)]
        if not faults:
            return system
    raise SpecError("\n".join(f"{where}: {fault}" for fault in faults))


def _unknown(what: str, body: Any, known: tuple[str, ...], needed: tuple[str, ...]) -> Iterator[str]:
    for key in body:
        if key not in known:
            yield f"{what} has the unknown key '{key}'; known: {', '.join(known)}"
    for key in needed:
        if key not in body:
            yield f"{what} lacks the key '{key}'"


def _build(body: dict[str, Any]) -> System:
    actors = {
        name: Actor(**{"name": name, **one, "merge": tuple(one.get("merge", ()))})
        for name, one in body["actors"].items()
    }
    links = tuple(
        Link(sender, receiver, tuple(one["messages"]))
        for one in body["sends"]
        for sender in _listed(one["from"])
        for receiver in _listed(one["to"])
    )
    return System(actors, links)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _faults(system: System, specs: Mapping[str, Spec], messages: ModuleType) -> Iterator[str]:
    for actor in system.actors.values():
        if actor.full not in POLICIES:
            yield f"actor {actor.name}: full is '{actor.full}'; choose one of {', '.join(POLICIES)}"
        if type(actor.mailbox) is not int or actor.mailbox < 1:
            yield f"actor {actor.name}: mailbox must be a positive integer, not {actor.mailbox!r}"
        if (actor.full == "merge") != bool(actor.merge):
            yield f'actor {actor.name}: `merge` lists the mergeable messages exactly when full = "merge"'
        if actor.spec is not None and actor.spec not in specs:
            yield f"actor {actor.name}: there is no machine '{actor.spec}'; machines: {', '.join(specs)}"
    for link in system.links:
        for name in (link.sender, link.receiver):
            if name not in system.actors:
                yield f"sends {link.sender} -> {link.receiver}: '{name}' isn't in [actors]; declare it"
        for message in link.messages:
            if not isinstance(getattr(messages, message, None), type):
                yield f"sends {link.sender} -> {link.receiver}: there is no message struct '{message}'"
    yield from _unmatched(system, specs)
    cycle = waiting_cycle(system)
    if cycle:
        yield f"actors wait in a circle on full mailboxes: {' -> '.join(cycle)}; give one another policy"


def _unmatched(system: System, specs: Mapping[str, Spec]) -> Iterator[str]:
    """Events without sender, messages without event, machines without actor."""
    played = {actor.spec for actor in system.actors.values()}
    for name, spec in specs.items():
        if name not in played and spec.speed != "array":
            yield f'machine {name} belongs to no actor; add one with spec = "{name}"'
    for actor in system.actors.values():
        if actor.spec is None or actor.spec not in specs:
            continue
        spec = specs[actor.spec]
        sent = system.into(actor.name)
        for event, say in spec.events.items():
            inside = say.partition(":")[0] in ("timer", "self")
            if event not in sent and not inside:
                yield f"actor {actor.name}: nobody sends {event}, an event of {actor.spec}; add a [[sends]]"
        for message in sorted(sent - set(spec.events)):
            yield f"actor {actor.name}: {message} is sent to it and isn't an event of {actor.spec}"


def waiting_cycle(system: System) -> list[str]:
    """Actors of which each may wait for the next one's full mailbox, first repeated last; empty if none."""
    waits: dict[str, list[str]] = {name: [] for name in system.actors}
    for link in system.links:
        receiver = system.actors.get(link.receiver)
        if receiver is not None and receiver.full == "wait" and link.sender in waits:
            waits[link.sender].append(link.receiver)
    done: set[str] = set()
    for start in waits:
        trail: list[str] = []
        if _walk(start, waits, trail, done):
            return trail[trail.index(trail[-1]) :]
    return []


def _walk(name: str, waits: dict[str, list[str]], trail: list[str], done: set[str]) -> bool:
    if name in done:
        return False
    trail.append(name)
    if name in trail[:-1] or any(_walk(after, waits, trail, done) for after in waits[name]):
        return True
    trail.pop()
    done.add(name)
    return False
