"""Finite automata over characters: built step by step, combined, made minimal, measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.grammar.gate import charset
from engine.grammar.gate.charset import Ranges
from engine.grammar.gate.minimal import Row, minimal
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.work import MAX_WORK, spend

MAX_STATES = 1500
MAX_RAW_STATES = 8_000
MAX_NFA = 12_000
State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Dfa:
    """A deterministic automaton. State 0 is the start; only states that can still accept are kept."""

    rows: tuple[Row, ...]
    accepting: tuple[bool, ...]

    @property
    def empty(self) -> bool:
        """Whether it accepts nothing."""
        return not any(self.accepting)

    def lengths(self) -> tuple[int, int | None]:
        """Characters of the shortest text, and of the longest; None where there is no longest."""
        distances = {0: 0}
        for state in (todo := [0]):
            for _, _, target in self.rows[state]:
                if target not in distances:
                    distances[target] = distances[state] + 1
                    todo.append(target)
        shortest = min((distances[one] for one in todo if self.accepting[one]), default=0)
        # Every state can still accept: where there is a loop, there is no longest text.
        entered = [0] * len(self.rows)
        for row in self.rows:
            for _, _, target in row:
                entered[target] += 1
        longest, free = [0] * len(self.rows), [one for one, count in enumerate(entered) if not count]
        for state in free:
            for _, _, target in self.rows[state]:
                longest[target] = max(longest[target], longest[state] + 1)
                entered[target] -= 1
                if not entered[target]:
                    free.append(target)
        return shortest, max(longest) if len(free) == len(self.rows) else None

    def has_length(self, low: int, high: int | None) -> bool:
        """Whether some text has `low` to `high` characters; yes where finding out would take too long."""
        shortest, longest = self.lengths()
        if (high is not None and shortest > high) or (longest is not None and longest < low):
            return False
        # A long text can be cut by a loop of at most as many characters as there are states.
        if high is None or high - low >= len(self.rows) or high * len(self.rows) > MAX_WORK:
            return True
        reached = {0}
        for size in range(high + 1):
            if size >= low and any(self.accepting[state] for state in reached):
                return True
            reached = {target for state in reached for _, _, target in self.rows[state]}
        return False

    def accepts(self, text: str) -> bool:
        """Whether the whole text is in the language."""
        state = 0
        for character in text:
            point = ord(character)
            found = [target for low, high, target in self.rows[state] if low <= point <= high]
            if not found:
                return False
            state = found[0]
        return self.accepting[state]


def explore(
    first: State,
    row: Callable[[State], Sequence[tuple[int, int, State]]],
    accepts: Callable[[State], bool],
) -> Dfa:
    """The automaton of every state that `row` reaches, trimmed and minimal. Refuses too many states."""
    numbers: dict[State, int] = {first: 0}
    states, rows = [first], []
    for state in states:
        entries = []
        for low, high, target in row(state):
            if target not in numbers:
                numbers[target] = len(states)
                states.append(target)
                if len(states) > MAX_RAW_STATES:
                    raise GrammarRefused(f"an automaton of more than {MAX_RAW_STATES} states is needed")
            entries.append((low, high, numbers[target]))
        spend(1 + len(entries))
        rows.append(entries)
    found = Dfa(*minimal(rows, [accepts(state) for state in states]))
    if len(found.rows) > MAX_STATES:
        raise GrammarRefused(f"an automaton of {len(found.rows)} states is needed, more than {MAX_STATES}")
    return found


def conjunction(parts: Sequence[tuple[Dfa, bool]]) -> Dfa:
    """Texts that each automaton accepts, or refuses where its flag is False."""
    dead = -1

    def row(state: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
        cuts = {0, 0xD800, 0xE000, charset.LAST + 1}
        for (dfa, _), one in zip(parts, state, strict=True):
            if one != dead:
                cuts |= {edge for low, high, _ in dfa.rows[one] for edge in (low, high + 1)}
        ordered = sorted(cuts)
        found = []
        for low, after in itertools.pairwise(ordered):
            if low == 0xD800:
                continue
            target = tuple(
                dead if one == dead else _next(dfa, one, low)
                for (dfa, _), one in zip(parts, state, strict=True)
            )
            if all(one != dead or not wanted for (_, wanted), one in zip(parts, target, strict=True)):
                found.append((low, after - 1, target))
        return found

    def accepts(state: tuple[int, ...]) -> bool:
        return all(
            (one != dead and dfa.accepting[one]) == wanted
            for (dfa, wanted), one in zip(parts, state, strict=True)
        )

    return explore((0,) * len(parts), row, accepts)


def _next(dfa: Dfa, state: int, point: int) -> int:
    return next((target for low, high, target in dfa.rows[state] if low <= point <= high), -1)


def without(dfa: Dfa, ranges: Ranges) -> Dfa:
    """Texts of the language that hold none of these characters."""
    rows = [
        [
            (first, last, target)
            for low, high, target in row
            for first, last in charset.minus(((low, high),), ranges)
        ]
        for row in dfa.rows
    ]
    return Dfa(*minimal(rows, list(dfa.accepting)))
