"""What a machine's TOML file says, as values. `load.py` gets them; `rules.py` says what is demanded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEEDS = ("hot", "cold", "array")


@dataclass(frozen=True)
class Timeout:
    """A state's time-out: armed on entry, dropped on leaving.

    after_ms  milliseconds, or the name of a core's attribute that holds them
    """

    after_ms: int | str
    event: str


@dataclass(frozen=True)
class State:
    """One state; a run may not end in a state that is `must_leave`."""

    name: str
    say: str
    timeout: Timeout | None = None
    must_leave: bool = False


@dataclass(frozen=True)
class Row:
    """One answer: in these states, on this event, if this guard holds, do these actions, go there.

    number     counted from 1 in file order
    line       of its `[[on]]` in the file
    to         None stays in the state; a state's own name enters it anew
    or_error   `else = "error"`: where no guard of the group holds, the event is unexpected
    """

    number: int
    line: int
    states: tuple[str, ...]
    event: str
    guard: str | None = None
    actions: tuple[str, ...] = ()
    to: str | None = None
    defer: bool = False
    ignore: bool = False
    why: str = ""
    or_error: bool = False

    def label(self) -> str:
        """How reports name the row: number, event, states and guard."""
        condition = f" if {self.guard}" if self.guard else ""
        return f"row {self.number} ({self.event} in {', '.join(self.states)}{condition})"


@dataclass(frozen=True)
class Invariant:
    """What must hold.

    check  scope core: a method `(self) -> bool` of the core
           scope system: a function `(world) -> bool` of the core's module
    """

    id: str
    say: str
    scope: str
    check: str


@dataclass(frozen=True)
class Spec:
    """One declared machine, complete and resolved. `digest` is the SHA-256 of the file."""

    path: Path
    digest: str
    name: str
    owner: str
    speed: str
    say: str
    initial: str
    final: tuple[str, ...]
    states: dict[str, State]
    events: dict[str, str]
    rows: tuple[Row, ...]
    never: frozenset[tuple[str, str]]
    invariants: tuple[Invariant, ...]
    max_deferred: int
    core: type[Any]

    def group(self, state: str, event: str) -> list[Row]:
        """The rows that answer (state, event), in the order in which they are tried."""
        return [row for row in self.rows if row.event == event and state in row.states]

    def system_check(self, invariant: Invariant) -> Callable[[Any], bool]:
        """The function `(world) -> bool` of the core's module that a system invariant names."""
        check: Callable[[Any], bool] = getattr(sys.modules[self.core.__module__], invariant.check)
        return check

    def timer_events(self) -> set[str]:
        """Events that are a state's time-out."""
        return {state.timeout.event for state in self.states.values() if state.timeout}
