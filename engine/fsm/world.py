"""The processes of a search in numbers: snapshots, messages and reactions, each computed once.

What a core does with a message depends on its snapshot alone, so a reaction is run once and then looked up: a
state of the whole system is a tuple of small integers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.fsm.freeze import freeze
from engine.fsm.search import Search
from engine.fsm.spec import Spec
from engine.fsm.system import Sent, kind_of
from engine.fsm.table import Machine, Taken
from engine.fsm.vector import VectorMachine


class Ids:
    """Values and their numbers, in order of appearance."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any) -> int:
        """The value's number; a value that can't be hashed is told by its type and text."""
        try:
            number = self._numbers.setdefault(value, len(self.values))
        except TypeError:
            number = self._numbers.setdefault((type(value), repr(value)), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Reaction(NamedTuple):
    """What one process did: its snapshot afterwards, its messages to cores and its other effects.

    sends  (sender number, index of the receiving core, message number)
    outs   numbers of effects for the environment
    fault  what went wrong, None where nothing did
    """

    snap: int
    sends: tuple[tuple[int, int, int], ...]
    outs: tuple[int, ...]
    fault: str | None


@dataclass(frozen=True, slots=True)
class World:
    """What an invariant sees: live cores by name, the environment, messages on their way."""

    cores: dict[str, Any]
    environment: Any
    flying: Callable[[], list[tuple[str, str, Any]]]

    @property
    def in_flight(self) -> list[tuple[str, str, Any]]:
        """(sender, receiver, message) of all that is sent and not yet received."""
        return self.flying()


class Processes:
    """The cores and the environment of one search, restored and run on demand."""

    def __init__(self, search: Search) -> None:
        self.names = tuple(search.cores)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.senders = Ids()
        for name in (*self.names, "environment"):
            self.senders.number(name)
        self.messages = Ids()
        self.effects = Ids()
        self.snaps = [Ids() for _ in range(len(self.names) + 1)]
        self.fired: set[Taken] = set()
        self.sent: set[Sent] = set()
        self._builders: list[Callable[[], Any]] = [*search.cores.values()]
        self.environment: int | None = None  # Its index.
        if search.environment is not None:
            self.environment = len(self.names)
            self._builders.append(search.environment)
        self._scratch = [build() for build in self._builders]
        self._fixed = [_fixed(process) for process in self._scratch]
        self._live: dict[tuple[int, int], Any] = {}
        self._reactions: dict[Any, Reaction] = {}
        self.start = tuple(
            self.snaps[i].number(process.snapshot()) for i, process in enumerate(self._scratch)
        )

    def specs(self) -> list[Spec]:
        """The specs of all machines that take part, array machines included."""
        return [machine.table.spec for process in self._scratch for machine in _machines(process)]

    def live(self, process: int, snap: int) -> Any:
        """The process restored to this snapshot; to be read only."""
        found = self._live.get((process, snap))
        if found is None:
            found = self._live[process, snap] = self._builders[process]()
            found.restore(self.snaps[process].values[snap])
        return found

    def receive(self, process: int, snap: int, message: int) -> Reaction:
        """The core's reaction to a message."""
        return self._react((process, snap, message), lambda core: core.receive(self.messages.values[message]))

    def time_out(self, process: int, snap: int) -> Reaction:
        """The core's reaction to its state's time-out."""
        return self._react((process, snap, "time-out"), lambda core: core.receive(core.time_out()))

    def choose(self, snap: int, choice: Any) -> Reaction:
        """The environment's choice."""
        return self._react((len(self.names), snap, "choice", choice), lambda env: env.choose(choice))

    def observe(self, snap: int, sender: int, effect: int) -> Reaction:
        """The environment learns of an effect."""
        name = self.names[sender]
        value = self.effects.values[effect]
        return self._react((len(self.names), snap, sender, effect), lambda env: env.observe(name, value))

    def _react(self, key: Any, act: Callable[[Any], list[Any]]) -> Reaction:
        reaction = self._reactions.get(key)
        if reaction is None:
            reaction = self._reactions[key] = self._run(key[0], key[1], act)
        return reaction

    def _run(self, process: int, snap: int, act: Callable[[Any], list[Any]]) -> Reaction:
        live = self._scratch[process]
        live.restore(self.snaps[process].values[snap])
        for machine in _machines(live):
            machine.record.clear()
        try:
            effects = act(live)
        except Exception as error:
            # Any error of a core is a finding: in production its actor ends.
            self._note(live)
            self._scratch[process] = self._builders[process]()
            return Reaction(snap, (), (), f"{type(error).__name__}: {error}")
        self._note(live)
        sends, outs = [], []
        for effect in effects:
            self._note_sent(process, effect)
            to = self.index.get(getattr(effect, "to", None) or "")
            if to is None:
                outs.append(self.effects.number(effect))
            else:
                sender = getattr(effect, "sender", None)
                number = process if sender is None else self.senders.number(sender)
                sends.append((number, to, self.messages.number(effect.msg)))
        fault = self._changed(process) or _broken(live)
        return Reaction(self.snaps[process].number(live.snapshot()), tuple(sends), tuple(outs), fault)

    def _note(self, live: Any) -> None:
        for machine in _machines(live):
            self.fired.update(machine.fired())

    def _note_sent(self, process: int, effect: Any) -> None:
        if process == self.environment:
            return
        sender = kind_of(self.names[process])
        if hasattr(effect, "job"):
            self.sent.add(Sent(sender, "device", type(effect.job).__name__))
        elif hasattr(effect, "to"):
            self.sent.add(Sent(sender, kind_of(effect.to), type(effect.msg).__name__))

    def _changed(self, process: int) -> str | None:
        live, before = self._scratch[process], self._fixed[process]
        after = _fixed(live)
        for name in after.keys() | before.keys():
            if after.get(name) != before.get(name):
                return f"field '{name}' of {type(live).__name__} changed and isn't in DATA; add it there"
        return None


def _fixed(process: Any) -> dict[str, Any]:
    """The fields that aren't in DATA, frozen; none of them may change."""
    fixed = {}
    for name, value in vars(process).items():
        if name not in process.DATA and not name.startswith("_"):
            try:
                fixed[name] = freeze(value)
            except (TypeError, RecursionError):
                fixed[name] = id(value)
    return fixed


def _machines(process: Any) -> list[Any]:
    """The machines of a core: its own, and array machines that it holds directly or in a field's field."""
    found = []
    for value in vars(process).values():
        inner = vars(value).values() if hasattr(value, "__dict__") else ()
        found += [one for one in (value, *inner) if isinstance(one, (Machine, VectorMachine))]
    return found


def _broken(live: Any) -> str | None:
    """The first broken invariant of the core's machines."""
    for machine in _machines(live):
        for invariant in machine.table.spec.invariants:
            if invariant.scope == "core" and not getattr(machine.owner, invariant.check)():
                return f"invariant {invariant.id} is broken: {invariant.say}"
    return None
