"""Exhaustive breadth-first search over the shipping cores, their channels and what comes from outside.

Breadth first, so the first violation that is found has the shortest run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.fsm.search import Search
from engine.fsm.steps import Move, State, Steps
from engine.fsm.system import Sent
from engine.fsm.table import Taken


@dataclass(frozen=True)
class Violation:
    """What is wrong and the shortest run that shows it, one line a step."""

    text: str
    run: tuple[str, ...]

    def report(self) -> str:
        """Text for a terminal."""
        steps = "\n".join(f"  {number:3}. {line}" for number, line in enumerate(self.run, 1))
        return f"{self.text}\nafter {len(self.run)} steps:\n{steps}"


@dataclass(frozen=True)
class Found:
    """What a search found.

    fired  every row that was taken, in each state in which it was
    sent   every message that a core sent; a Run is sent to `device`
    """

    states: int
    edges: int
    violation: Violation | None
    fired: frozenset[Taken]
    sent: frozenset[Sent]


class Explorer:
    """One search, done once by `run`.

    max_states  gives up beyond; None: the search's own bound
    """

    def __init__(self, search: Search, max_states: int | None = None) -> None:
        self.search = search
        self.steps = Steps(search)
        self._max_states = search.max_states if max_states is None else max_states
        self._invariants = [*search.invariants, *self._declared()]
        self._seen = {self.steps.start: 0}
        self._order = [self.steps.start]
        self._parents: list[tuple[int, Move | None]] = [(-1, None)]
        self._back: list[list[int]] = [[]]
        self._ends: list[int] = []
        self._edges = 0

    def _declared(self) -> list[tuple[str, Callable[[Any], bool]]]:
        """System invariants of the specs of the cores that take part."""
        specs = {spec.name: spec for spec in self.steps.processes.specs()}
        return [
            (f"{invariant.id} ({invariant.say})", spec.system_check(invariant))
            for spec in specs.values()
            for invariant in spec.invariants
            if invariant.scope == "system"
        ]

    def run(self) -> Found:
        """The whole search, or up to the first violation."""
        with _no_collection():
            violation = self._broken(0)
            at = 0
            while violation is None and at < len(self._order):
                violation = self._expand(at)
                at += 1
            if violation is None:
                violation = self._no_way_out()
        seen = self.steps.processes
        return Found(len(self._order), self._edges, violation, frozenset(seen.fired), frozenset(seen.sent))

    def _expand(self, at: int) -> Violation | None:
        state = self._order[at]
        moves = self.steps.moves(state)
        if all(move.optional for move in moves):
            self._ends.append(at)
            fault = self._bad_end(state)
            if fault:
                return Violation(fault, self._path(at))
        for move in moves:
            after, fault = self.steps.take(state, move)
            if fault:
                return Violation(fault, (*self._path(at), self.steps.show(state, move)))
            violation = self._arrive(at, move, after)
            if violation:
                return violation
        return None

    def _arrive(self, at: int, move: Move, after: State) -> Violation | None:
        self._edges += 1
        known = self._seen.setdefault(after, len(self._order))
        new = known == len(self._order)
        if new:
            self._order.append(after)
            self._parents.append((at, move))
            self._back.append([])
        self._back[known].append(at)
        if not new:
            return None
        if known >= self._max_states:
            return Violation(f"gave up: more than {self._max_states} states", self._path(known))
        return self._broken(known)

    def _broken(self, at: int) -> Violation | None:
        """The first system invariant that doesn't hold in this state."""
        if self._invariants:
            world = self.steps.world(self._order[at])
            for name, holds in self._invariants:
                if not holds(world):
                    return Violation(f"invariant {name} is broken", self._path(at))
        return None

    def _bad_end(self, state: State) -> str | None:
        """Why a run may not end here, where nothing more needs to happen."""
        cores = dict(zip(self.steps.processes.names, self.steps.cores(state), strict=True))
        if self.steps.spent(state) and any(core.armed for core in cores.values()):
            return None  # Cut off by the bound on time-outs, not ended.
        for name, core in cores.items():
            if core.spec.states[core.state].must_leave:
                return f"the run ends although {name} must leave {core.state}"
            if core.state not in self.search.ends.get(name, (core.state,)):
                return f"the run ends with {name} in {core.state}, not in {', '.join(self.search.ends[name])}"
            if core.waiting and not core.ended:
                return f"the run ends while {name} in {core.state} still defers {core.waiting[0]}"
        world = self.steps.world(state)
        for name, holds in self.search.at_end:
            if not holds(world):
                return f"the run ends although {name} doesn't hold"
        return None

    def _no_way_out(self) -> Violation | None:
        """A state from which no end can be reached: the system would go round in it for ever."""
        reaching = set(self._ends)
        todo = list(self._ends)
        while todo:
            for before in self._back[todo.pop()]:
                if before not in reaching:
                    reaching.add(before)
                    todo.append(before)
        lost = next((at for at in range(len(self._order)) if at not in reaching), None)
        return None if lost is None else Violation("no end can be reached any more", self._path(lost))

    def _path(self, at: int) -> tuple[str, ...]:
        lines: list[str] = []
        parent, move = self._parents[at]
        while move is not None:
            lines.append(self.steps.show(self._order[parent], move))
            parent, move = self._parents[parent]
        return tuple(reversed(lines))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A search keeps many tuples and makes no cycles; looking for cycles took most of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
