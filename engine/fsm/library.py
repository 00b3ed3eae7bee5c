"""The same spec as a `transitions.Machine`: what cold machines run on, and the oracle for the compiled table.

Actions are `before` callbacks: when an `after` callback of the library raises, the state has already changed.
"""

from __future__ import annotations

from typing import Any

from transitions import Machine as Transitions
from transitions import MachineError

from engine.fsm.spec import Row
from engine.fsm.table import DEFER, STAY, CompiledRow, Machine, Table


class LibraryMachine(Machine):
    """As `table.Machine`, but the choice of the row, its actions and the move are done by `transitions`."""

    __slots__ = ("_library", "_model", "_taken")

    def __init__(self, table: Table, owner: Any) -> None:
        super().__init__(table, owner)
        self._taken: CompiledRow | None = None
        model: Any = _Model()
        self._model = model
        self._library = Transitions(
            model=model,
            states=list(table.states),
            initial=table.spec.initial,
            auto_transitions=False,
            send_event=False,
        )
        for row in table.spec.rows:
            for state in row.states:
                self._add(row, state)

    def _add(self, row: Row, state: str) -> None:
        compiled = next(
            one
            for one in self.table.answers[self.table.state_index[state]][self.table.event_index[row.event]]
            if one[3][2] == row.number
        )
        guard, actions, _, _ = compiled

        def holds(msg: Any) -> bool:
            return guard is None or guard(self.owner, msg)

        def act(msg: Any) -> None:
            for action in actions:
                action(self.owner, msg)
            self._taken = compiled

        self._library.add_transition(row.event, state, row.to, conditions=[holds], before=[act])

    def fire(self, event: int, msg: Any = None) -> None:
        """As `Machine.fire`."""
        before = self._state
        changed = self._step(event, msg)
        if self._posted or (changed and self._deferred):
            self._settle(before, changed)

    def _step(self, event: int, msg: Any) -> bool:
        self._taken = None
        name = self.table.events[event]
        if name not in self._library.events:  # No row of any state answers it.
            raise self.table.unexpected(self._state, event, msg)
        try:
            self._model.trigger(name, msg)
        except MachineError as error:
            raise self.table.unexpected(self._state, event, msg) from error
        if self._taken is None:
            raise self.table.unexpected(self._state, event, msg)
        _, _, to, note = self._taken
        self.record.append(note)
        if to == DEFER:
            self._keep(event, msg)
        elif to != STAY:
            self._move(to)
            self.entry += 1
        return to >= 0

    def _move(self, state: int) -> None:
        super()._move(state)
        self._library.set_state(self.table.states[state])


class _Model:
    """What `transitions` hangs its state and triggers on."""
