"""A spec compiled to integers and tuples, and the machine that runs it for one core.

Firing costs a list index, a guard call, the action calls and two appends; `bench machine` prints it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.errors import Unexpected
from engine.fsm.spec import Row, Spec

STAY = -1
DEFER = -2
RECORDED = 256  # Entries of the flight recorder of one machine.

Guard = Callable[[Any, Any], bool]
Action = Callable[[Any, Any], None]
# guard, actions, next state (or STAY, DEFER), and what the flight recorder notes: (state, event, row number).
CompiledRow = tuple[Guard | None, tuple[Action, ...], int, tuple[str, str, int]]


class Taken(NamedTuple):
    """A row that a search took, and in which state."""

    spec: str
    state: str
    row: int


class Table:
    """A spec in integers, for one class of owners; machines share it.

    owner           the class that has the guards and actions: the spec's, or a subclass of it
    states, events  names by index
    answers         answers[state][event]: rows in order, empty where the event is unexpected
    by_type         event index by message struct
    """

    __slots__ = ("answers", "by_type", "event_index", "events", "owner", "spec", "state_index", "states")

    def __init__(self, spec: Spec, owner: type[Any] | None = None) -> None:
        self.spec = spec
        self.owner = spec.core if owner is None else owner
        self.states = tuple(spec.states)
        self.events = tuple(spec.events)
        self.state_index = {state: i for i, state in enumerate(self.states)}
        self.event_index = {event: i for i, event in enumerate(self.events)}
        messages = getattr(self.owner, "MESSAGES", None)
        structs = {event: getattr(messages, event, None) for event in self.events}
        self.by_type = {s: self.event_index[event] for event, s in structs.items() if isinstance(s, type)}
        self.answers = tuple(
            tuple(self._rows(state, event) for event in self.events) for state in self.states
        )

    def _rows(self, state: str, event: str) -> tuple[CompiledRow, ...]:
        return tuple(self._row(row, state) for row in self.spec.group(state, event))

    def _row(self, row: Row, state: str) -> CompiledRow:
        guard = getattr(self.owner, row.guard) if row.guard else None
        actions = tuple(getattr(self.owner, name) for name in row.actions)
        to = DEFER if row.defer else STAY if row.to is None else self.state_index[row.to]
        return guard, actions, to, (state, row.event, row.number)

    def unexpected(self, state: int, event: int, msg: Any) -> Unexpected:
        """The error for an event that the state doesn't answer."""
        name, where = self.events[event], self.states[state]
        refused = self.answers[state][event]
        why = (
            f"no guard of rows {[row[3][2] for row in refused]} held"
            if refused
            else "declared never to happen"
        )
        return Unexpected(f"{self.spec.name}: {name} in {where}: {why}; message {_short(msg)}")


def _short(msg: Any) -> str:
    text = repr(msg)
    return text if len(text) <= 200 else text[:200] + "..."


class Machine:
    """One running machine: the state of one core.

    entry   grows with each entry of a state; a time-out that carries an older number was overtaken
    record  the flight recorder: the last 256 (state, event, row number)
    """

    __slots__ = ("_answers", "_deferred", "_posted", "_state", "entry", "owner", "record", "table")

    def __init__(self, table: Table, owner: Any) -> None:
        self.table = table
        self.entry = 0
        self.record: deque[tuple[str, str, int]] = deque(maxlen=RECORDED)
        self.owner = owner
        self._deferred: list[tuple[int, Any]] = []
        self._posted: list[tuple[int, Any]] = []
        self._state = table.state_index[table.spec.initial]
        self._answers = table.answers[self._state]

    @property
    def state(self) -> str:
        """The name of the state; there is no setter."""
        return self.table.states[self._state]

    @property
    def deferred(self) -> tuple[tuple[int, Any], ...]:
        """(event index, message) of messages that wait for the state to change, oldest first."""
        return tuple(self._deferred)

    def fire(self, event: int, msg: Any = None) -> None:
        """One event, and whatever it sets free: guards, actions, state change, posted, deferred.

        event   index in `table.events`
        raises  Unexpected where no row answers; whatever a guard or an action raises. The state is then that
                of before the call
        """
        core = self.owner
        for guard, actions, to, note in self._answers[event]:
            if guard is None or guard(core, msg):
                for action in actions:
                    action(core, msg)
                self.record.append(note)
                if to >= 0:
                    before = self._state
                    self._state = to
                    self._answers = self.table.answers[to]
                    self.entry += 1
                    if self._deferred or self._posted:
                        self._settle(before, changed=True)
                elif to == DEFER:
                    self._keep(event, msg)
                elif self._posted:
                    self._settle(self._state, changed=False)
                return
        raise self.table.unexpected(self._state, event, msg)

    def post(self, event: int, msg: Any = None) -> None:
        """An event of the core's own, fired after the current one's state change."""
        self._posted.append((event, msg))

    def _settle(self, before: int, changed: bool) -> None:
        """Posted events first, then deferred messages in order, again from the front after each change."""
        offered: deque[tuple[int, Any]] = deque()
        try:
            while True:
                if changed:
                    offered = deque([*self._deferred, *offered])
                    self._deferred.clear()
                if self._posted:
                    changed = self._step(*self._posted.pop(0))
                elif offered:
                    changed = self._step(*offered.popleft())
                else:
                    return
        except BaseException:
            self._move(before)
            self._posted.clear()
            raise

    def _step(self, event: int, msg: Any) -> bool:
        """One row, without what follows from it; true where a state was entered."""
        for guard, actions, to, note in self._answers[event]:
            if guard is None or guard(self.owner, msg):
                for action in actions:
                    action(self.owner, msg)
                self.record.append(note)
                if to >= 0:
                    self._move(to)
                    self.entry += 1
                elif to == DEFER:
                    self._keep(event, msg)
                return to >= 0
        raise self.table.unexpected(self._state, event, msg)

    def _keep(self, event: int, msg: Any) -> None:
        spec = self.table.spec
        if len(self._deferred) >= spec.max_deferred:
            raise Unexpected(f"{spec.name}: more than {spec.max_deferred} messages deferred in {self.state}")
        self._deferred.append((event, msg))

    def _move(self, state: int) -> None:
        self._state = state
        self._answers = self.table.answers[state]

    def fired(self) -> set[Taken]:
        """The recorded rows, for the search."""
        return {Taken(self.table.spec.name, state, number) for state, _, number in self.record}

    def snapshot(self) -> tuple[int, tuple[tuple[int, Any], ...]]:
        """State and deferred messages; not the entry number, which no decision may read."""
        return self._state, tuple(self._deferred)

    def restore(self, taken: tuple[int, tuple[tuple[int, Any], ...]]) -> None:
        """Back to a snapshot, for the search."""
        state, deferred = taken
        self._move(state)
        self._deferred = list(deferred)
        self._posted.clear()
