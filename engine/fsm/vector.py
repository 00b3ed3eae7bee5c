"""One machine a slot, as an integer array: one call fires an event for a whole batch of slots."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import Unexpected
from engine.fsm.table import RECORDED, STAY, Table, Taken

Slots = NDArray[np.intp]


class _Event:
    """The rows of one event as a decision list: a node is one row in one state.

    first       int16[S] the node that is asked first in each state; -1 where the event is unexpected
    guard       int16[nodes] index in `guards`; -1 where the row is taken without asking
    otherwise   int16[nodes] the node to ask when the guard says no; -1 for an error
    to, row     uint8[nodes], int16[nodes]
    """

    def __init__(self, table: Table, event: int) -> None:
        self.guards: list[Any] = []
        self.actions: dict[int, tuple[Any, ...]] = {}
        first: list[int] = []
        guard: list[int] = []
        otherwise: list[int] = []
        to: list[int] = []
        row: list[int] = []
        for state, answers in enumerate(table.answers):
            first.append(len(guard) if answers[event] else -1)
            for left, (question, actions, goes, note) in enumerate(answers[event], 1 - len(answers[event])):
                if question is not None and question not in self.guards:
                    self.guards.append(question)
                guard.append(-1 if question is None else self.guards.index(question))
                otherwise.append(len(guard) if left < 0 else -1)
                to.append(state if goes == STAY else goes)
                row.append(note[2])
                if actions:
                    self.actions[note[2]] = actions
        self.actions = dict(sorted(self.actions.items()))
        self.first = np.array(first, np.int16)
        self.guard = np.array(guard, np.int16)
        self.otherwise = np.array(otherwise, np.int16)
        self.to = np.array(to, np.uint8)
        self.row = np.array(row, np.int16)


class VectorMachine:
    """The states of `capacity` machines of one spec with `speed = "array"`.

    Guards are methods `(self, slots, msg) -> bool[B]` over the whole batch. Actions are methods
    `(self, slots, at, msg)`: `slots` are those that take the row, `at` their places in the batch: the index
    into columns of length B that `msg` carries.

    states  uint8[capacity], index in `table.states`
    record  the flight recorder: the last 256 (event, slots, states before, row numbers)
    """

    def __init__(self, table: Table, owner: Any, capacity: int) -> None:
        if table.spec.speed != "array":
            raise TypeError(f"{table.spec.name} has speed '{table.spec.speed}'; a vector needs 'array'")
        self.table = table
        self.states = np.full(capacity, table.state_index[table.spec.initial], np.uint8)
        self.record: deque[tuple[str, Slots, NDArray[np.uint8], NDArray[np.int16]]] = deque(maxlen=RECORDED)
        self.owner = owner
        self._events = [_Event(table, event) for event in range(len(table.events))]

    def fire(self, event: int, slots: Slots, msg: Any = None) -> None:
        """One event for these slots: guards, then actions row by row in file order, then the states.

        event   index in `table.events`
        slots   int[B], each slot at most once
        raises  Unexpected naming the first slot that has no answer; no state has then moved
        """
        rules = self._events[event]
        before = self.states[slots]
        node = rules.first[before]
        if node.size and node.min() < 0:
            raise self._unexpected(event, slots, int(np.argmin(node)), msg)
        if rules.guards:
            self._ask(rules, event, node, slots, msg)
        rows = rules.row[node]
        for number, actions in rules.actions.items():
            at = np.flatnonzero(rows == number)
            if at.size:
                for action in actions:
                    action(self.owner, slots[at], at, msg)
        self.states[slots] = rules.to[node]
        self.record.append((self.table.events[event], slots, before, rows))

    def _ask(self, rules: _Event, event: int, node: NDArray[np.int16], slots: Slots, msg: Any) -> None:
        """Moves each slot's node along until its guard holds or it has none; each guard is asked once."""
        columns: dict[int, NDArray[np.bool_]] = {}
        undecided = np.flatnonzero(rules.guard[node] >= 0)
        while undecided.size:
            asked = rules.guard[node[undecided]]
            refused = np.zeros(undecided.size, np.bool_)
            for guard in np.unique(asked).tolist():
                if guard not in columns:
                    columns[guard] = np.asarray(rules.guards[guard](self.owner, slots, msg), np.bool_)
                refused |= (asked == guard) & ~columns[guard][undecided]
            undecided = undecided[refused]
            node[undecided] = rules.otherwise[node[undecided]]
            lost = undecided[node[undecided] < 0]
            if lost.size:
                raise self._unexpected(event, slots, int(lost[0]), msg)
            undecided = undecided[rules.guard[node[undecided]] >= 0]

    def _unexpected(self, event: int, slots: Slots, place: int, msg: Any) -> Unexpected:
        slot = int(slots[place])
        return Unexpected(f"slot {slot}: {self.table.unexpected(int(self.states[slot]), event, msg)}")

    def state(self, slot: int) -> str:
        """Name of this slot's state."""
        return str(self.table.states[self.states[slot]])

    def within(self, *names: str) -> Slots:
        """The slots whose state is one of these, ascending."""
        wanted = [self.table.state_index[name] for name in names]
        return np.flatnonzero(np.isin(self.states, wanted))

    def fired(self) -> set[Taken]:
        """The recorded rows, for the search."""
        name, states = self.table.spec.name, self.table.states
        pairs = {
            pair
            for _, _, before, rows in self.record
            for pair in zip(before.tolist(), rows.tolist(), strict=True)
        }
        return {Taken(name, states[state], row) for state, row in pairs}

    def snapshot(self) -> bytes:
        """All states, for the search."""
        return self.states.tobytes()

    def restore(self, taken: bytes) -> None:
        """Back to a snapshot."""
        self.states = np.frombuffer(taken, np.uint8).copy()
