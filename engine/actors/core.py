"""The synchronous part of an actor: takes one message, decides, returns effects.

A core has no clock, no randomness, no tensor and never waits. Its states and rows are declared in
specs/NAME.toml; its guards are methods `(self, msg) -> bool`, its actions methods `(self, msg) -> None` that
change the core's own data and `emit` effects. The shell carries effects out only after the state has moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import msgspec

import engine.messages
from engine.errors import SpecError, Unexpected
from engine.fsm.freeze import freeze, thaw
from engine.fsm.library import LibraryMachine
from engine.fsm.load import spec_named
from engine.fsm.spec import Spec
from engine.fsm.table import Machine, Table


class Send(msgspec.Struct, frozen=True):
    """Effect: `msg` to the actor named `to`; without delay, in order per pair of actors."""

    to: str
    msg: Any


class Reply(msgspec.Struct, frozen=True):
    """Effect: the answer to an `ask`; `slot` is what the asking message carried. Late ones are dropped."""

    slot: Any
    value: Any


class Run(msgspec.Struct, frozen=True):
    """Effect: a job for the device thread or a worker thread, whose answer comes back as a message."""

    job: Any


class Stop(msgspec.Struct, frozen=True):
    """Effect: this actor has ended; its shell leaves after carrying out the effects before this one."""

    reason: str = ""


Effect = Send | Reply | Run | Stop


class TimedOut(NamedTuple):
    """Timer -> core: the time-out that was armed at this entry number. An overtaken one does nothing."""

    entry: int


class Armed(NamedTuple):
    """The time-out that the shell must hold now. `entry` goes into `TimedOut`."""

    entry: int
    after_ms: float


class Core:
    """Base of every core. A subclass gives SPEC, DATA, its guards and its actions.

    SPEC      name of the file in specs/, without .toml
    DATA      names of all fields that change after construction; what a snapshot holds. A field whose value
              has `snapshot()` and `restore(taken)` of its own is kept and restored in place
    MESSAGES  the module that the events' structs are in
    """

    SPEC: ClassVar[str] = ""
    DATA: ClassVar[tuple[str, ...]] = ()
    MESSAGES: ClassVar[ModuleType] = engine.messages
    RESERVED: ClassVar[bool] = True

    def __init__(self) -> None:
        spec = spec_named(self.SPEC)
        if not issubclass(type(self), spec.core):
            raise SpecError(f"{self.SPEC}.toml is owned by {spec.owner}, not by {type(self).__name__}")
        table = table_of(spec, type(self))
        build = LibraryMachine if spec.speed == "cold" else Machine
        self._machine = build(table, self)
        self._fire = self._machine.fire
        self._by_type = table.by_type
        self._effects: list[Effect] = []

    @property
    def spec(self) -> Spec:
        """The spec that this core runs."""
        return self._machine.table.spec

    @property
    def state(self) -> str:
        """Name of the current state."""
        return self._machine.state

    @property
    def ended(self) -> bool:
        """True in a final state."""
        return self._machine.state in self.spec.final

    @property
    def record(self) -> Iterable[tuple[str, str, int]]:
        """The flight recorder: the last 256 (state, event, row number), oldest first."""
        return tuple(self._machine.record)

    @property
    def waiting(self) -> tuple[Any, ...]:
        """Messages that are deferred, oldest first."""
        return tuple(msg for _, msg in self._machine.deferred)

    @property
    def entry(self) -> int:
        """Grows with each entry of a state; a shell that sees it changed asks `armed` anew."""
        return self._machine.entry

    @property
    def armed(self) -> Armed | None:
        """The current state's time-out, or None."""
        timeout = self.spec.states[self._machine.state].timeout
        if timeout is None:
            return None
        after = timeout.after_ms
        return Armed(self._machine.entry, getattr(self, after) if isinstance(after, str) else after)

    def time_out(self) -> TimedOut:
        """What the timer sends when the current state's time-out is due."""
        return TimedOut(self._machine.entry)

    def receive(self, msg: Any) -> list[Effect]:
        """One message through the machine; effects in the order in which the shell carries them out.

        raises  Unexpected, or what a guard or action raised: the state is as before and no effect leaves
        """
        event = self._by_type.get(type(msg))
        if event is None:
            event = self._event_of(msg)
            if event is None:
                return []
        try:
            self._fire(event, msg)
        except BaseException:
            self._effects = []
            raise
        effects = self._effects
        self._effects = []
        return effects

    def emit(self, effect: Effect) -> None:
        """Called by actions: an effect, handed to the shell after the state has moved."""
        self._effects.append(effect)

    def post(self, event: str, msg: Any = None) -> None:
        """Called by actions: an event of the core's own (its text begins with `self:`), handled next."""
        self._machine.post(self._machine.table.event_index[event], msg)

    def _event_of(self, msg: Any) -> int | None:
        """The event of a time-out; None for an overtaken one."""
        if type(msg) is not TimedOut:
            raise Unexpected(f"{self.SPEC}: {type(msg).__name__} isn't among its events")
        timeout = self.spec.states[self._machine.state].timeout
        if msg.entry != self._machine.entry or timeout is None:
            return None
        return self._machine.table.event_index[timeout.event]

    def snapshot(self) -> tuple[Any, ...]:
        """Everything that decides what the core does next, as a hashable."""
        fields = []
        for name in self.DATA:
            value = getattr(self, name)
            fields.append(value.snapshot() if hasattr(value, "snapshot") else freeze(value))
        state, deferred = self._machine.snapshot()
        return state, freeze(deferred), tuple(fields)

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot of a core that was built with the same arguments."""
        state, deferred, fields = taken
        self._machine.restore((state, thaw(deferred)))
        self._effects = []
        for name, frozen in zip(self.DATA, fields, strict=True):
            value = getattr(self, name)
            if hasattr(value, "restore"):
                value.restore(frozen)
            else:
                setattr(self, name, thaw(frozen))


_tables: dict[tuple[int, type], Table] = {}


def table_of(spec: Spec, owner: type | None = None) -> Table:
    """The table of this very spec object for this class (the spec's own by default), compiled once."""
    key = (id(spec), spec.core if owner is None else owner)
    table = _tables.get(key)
    if table is None or table.spec is not spec:
        table = _tables[key] = Table(spec, key[1])
    return table
