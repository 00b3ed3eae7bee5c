"""What a replay sees of the actors: every message that a core takes, with its effects, hashed and handed to
monitors.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from engine.actors.core import Core, Effect

KEPT = 60
"""Newest events that a failure prints."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What was found: id of the invariant (I1..I16, or crash, hang), what is wrong, virtual seconds."""

    id: str
    text: str
    at_s: float

    def report(self) -> str:
        """One line."""
        return f"{self.id} at {self.at_s:.4f} s: {self.text}"


@dataclass(frozen=True, slots=True)
class Event:
    """One message taken by a core."""

    at_s: float
    actor: str
    before: str
    after: str
    msg: Any
    effects: tuple[Effect, ...]

    def line(self) -> str:
        """For a person."""
        state = self.before if self.before == self.after else f"{self.before} -> {self.after}"
        return f"{self.at_s:9.4f}  {self.actor:<9} {brief(self.msg):<44} {state}"


Monitor = Callable[[Core, Event], None]
"""Called with each event by the core that took it."""


class Watch:
    """The trace of one run.

    kept      events; the newest KEPT, or all of them
    monitors  by the spec of the cores that they watch
    found     the first violation
    on_found  called once, with it
    """

    def __init__(self, keep_all: bool = False) -> None:
        self.kept: deque[Event] = deque(maxlen=None if keep_all else KEPT)
        self.events = 0
        self.found: Violation | None = None
        self.on_found: Callable[[], None] = lambda: None
        self.monitors: dict[str, list[Monitor]] = {}
        self._hash = hashlib.blake2b(digest_size=16)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=repr)

    @property
    def digest(self) -> str:
        """Hash of everything that happened so far."""
        return self._hash.hexdigest()

    def wrong(self, invariant: str, text: str) -> None:
        """A violation. The first one ends the run."""
        if self.found is None:
            self.found = Violation(invariant, text, anyio.current_time())
            self.on_found()

    def note(self, who: str, what: str) -> None:
        """Something outside the actors, for the hash: a client's end, a fault."""
        self._hash.update(f"{anyio.current_time():.7f} {who} {what}".encode())

    def received(self, core: Core, before: str, msg: Any, effects: list[Effect]) -> None:
        """A core has taken a message."""
        self.events += 1
        name = actor_name(core)
        now_s = anyio.current_time()
        after = core.state
        line = f"{now_s:.7f} {name} {before} {after} {type(msg).__name__}"
        self._hash.update(line.encode() + self._encoder.encode(msg))
        event = Event(now_s, name, before, after, msg, tuple(effects))
        self.kept.append(event)
        for monitor in self.monitors.get(core.SPEC, ()):
            monitor(core, event)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Within the block every core's messages pass by `watch`; the cores themselves don't know."""
    receive = Core.receive

    def watched(self: Core, msg: Any) -> list[Effect]:
        before = self.state
        effects = receive(self, msg)
        watch.received(self, before, msg, effects)
        return effects

    setattr(Core, "receive", watched)  # noqa: B010
    try:
        yield
    finally:
        setattr(Core, "receive", receive)  # noqa: B010


def actor_name(core: Core) -> str:
    """The name of an actor by its core."""
    setup = getattr(core, "setup", None)
    return core.SPEC if setup is None else f"{core.SPEC}{setup.rank}"


def brief(msg: Any) -> str:
    """A message in a few words."""
    kind = type(msg).__name__
    fields = {}
    for name in ("epoch", "src", "request_id", "rank", "reason", "finish", "entry"):
        value = getattr(msg, name, None)
        if isinstance(value, (int, str)) and not (name == "reason" and value == ""):
            fields[name] = value
    items = getattr(msg, "items", None)
    if isinstance(items, tuple):
        fields["requests"] = ",".join(str(item.request_id) for item in items)
    return " ".join([kind, *(f"{name}={value}" for name, value in fields.items())])
