"""Objects laid out: listed members in their order, then others, and whether any object can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from engine.grammar.gate.alternatives import (
    ANYTHING,
    Goal,
    Members,
    Need,
    Obj,
    Str,
    both,
    holds_text,
    members_goal,
    names_of,
    plainly_empty,
)
from engine.grammar.gate.array_plans import MAX_STATES, Productive
from engine.grammar.gate.charset import ALL, of
from engine.grammar.gate.expansion import Expansion
from engine.grammar.gate.meeting import meet
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.tree import Chars, Edge, Either, Repeat, Seq, Tree

MAX_PATTERNS = 5
MAX_WAYS = 64
# An open object's own keys must differ from the listed names, or a later spelling of a listed name would win.
# Exactly so up to this many characters of names; beyond, they must differ in their first ones.
MAX_NAME_CHARS = 64

Cell = tuple[Str, Goal]
"""Keys of members that aren't listed, and what is asked of their values."""


@dataclass(frozen=True, slots=True)
class ObjPlan:
    """Objects: listed members in their order, each (name, goal, required), then others.

    must  one of these comes last of all, where there are any
    """

    entries: tuple[tuple[str, Goal, bool], ...]
    others: tuple[Cell, ...]
    must: tuple[Cell, ...]
    low: int
    high: int | None

    def goals(self) -> Iterator[Goal]:
        """Every goal that a member may have to meet."""
        yield from (goal for _, goal, _ in self.entries)
        yield from (goal for _, goal in (*self.others, *self.must))

    @property
    def cap(self) -> int:
        """Counts from here on are alike."""
        return max(1, self.low, self.high or 0)

    def last(self, count: int, productive: Productive) -> tuple[int, int | None] | None:
        """(fewest, most) other members after `count` listed ones; None where the object can't end well."""
        need, room = max(0, self.low - count), None if self.high is None else self.high - count
        if self.must:
            there = room != 0 and need <= 1 and any(productive(goal) for _, goal in self.must)
            return (1, room) if there else None
        if room == 0 or not any(productive(goal) for _, goal in self.others):
            return None if need else (0, 0)
        # Nothing keeps two other keys apart, so together they count as one.
        return None if need > 1 else (need, room)

    def alive(self, productive: Productive) -> list[set[int]]:
        """For each entry, and after the last, the counts from which the object can end well."""
        if (len(self.entries) + 1) * (self.cap + 1) > 20 * MAX_STATES:
            raise GrammarRefused(f"counting members needs more than {20 * MAX_STATES} states")
        after = {count for count in range(self.cap + 1) if self.last(count, productive) is not None}
        found = [after]
        for _, goal, required in reversed(self.entries):
            may = productive(goal)
            after = {
                count
                for count in range(self.cap + 1)
                if (not required and count in after)
                or (may and (self.high is None or count < self.high) and min(count + 1, self.cap) in after)
            }
            found.append(after)
        return found[::-1]

    def possible(self, productive: Productive) -> bool:
        """Whether there is any such object."""
        return 0 in self.alive(productive)[0]


def object_plans(one: Obj, expansion: Expansion, *, open_objects: bool) -> Iterator[ObjPlan]:
    """Objects of an alternative, one plan for each way to meet its needs.

    open_objects  listed properties alone don't close an object
    """
    keys = [key for key in expansion.goal(one.keys) if isinstance(key, Str)]
    never: Goal = ((expansion.document.nothing, True),)
    names = tuple(dict.fromkeys((*names_of(one.members), *one.required)))
    entries = []
    for name in names:
        allowed = not one.keys or any(holds_text(key, name) for key in keys)
        entries.append((name, members_goal(one, name) if allowed else never, name in one.required))
    says = any(part.rest is not None for part in one.members)
    closed = any(part.named for part in one.members) and not (says or open_objects)
    others = () if closed else tuple(_others(one, names, keys if one.keys else [Str()]))
    if others and one.low > len(names) + 1:
        why = "other keys may repeat, so at most one member more than are listed can be demanded"
        raise GrammarRefused(f"minProperties of {one.low} isn't enforced: {why}")
    for ways in _ways(one.needs, names):
        asked = [need for need, name in zip(one.needs, ways, strict=True) if name is None]
        must = tuple(_meeting(others, asked)) if asked else ()
        if asked and not must:
            continue
        listed = []
        for name, goal, required in entries:
            wanted = [need.goal for need, way in zip(one.needs, ways, strict=True) if way == name]
            listed.append((name, both(goal, *wanted), required or bool(wanted)))
        yield ObjPlan(tuple(listed), others, must, one.low, one.high)


def _ways(needs: tuple[Need, ...], names: tuple[str, ...]) -> list[tuple[str | None, ...]]:
    """For each need the listed name that meets it, or None for another member."""
    found: list[tuple[str | None, ...]] = [()]
    for need in needs:
        fitting = [name for name in names if holds_text(need.key, name)]
        found = [(*way, one) for way in found for one in (*fitting, None)]
        if len(found) > MAX_WAYS:
            raise GrammarRefused(f"there are more than {MAX_WAYS} ways to have the members that are wanted")
    return found


def _meeting(cells: tuple[Cell, ...], needs: list[Need]) -> Iterator[Cell]:
    """Members that aren't listed and meet all of these needs."""
    for key, goal in cells:
        kept: Str | None = key
        for need in needs:
            met = meet(kept, need.key) if kept is not None else None
            kept = met if isinstance(met, Str) else None
        if kept is not None and not plainly_empty(kept):
            yield kept, both(goal, *(need.goal for need in needs))


def _others(one: Obj, names: tuple[str, ...], keys: list[Str]) -> Iterator[tuple[Str, Goal]]:
    """Keys that aren't listed, by the patterns that they match."""
    trees = list(dict.fromkeys(tree for part in one.members for tree, _ in part.patterns))
    if len(trees) > MAX_PATTERNS:
        raise GrammarRefused(
            f"{len(trees)} patterns for the names of one object are more than {MAX_PATTERNS}"
        )
    for wanted in itertools.product((True, False), repeat=len(trees)):
        matched = {tree for tree, flag in zip(trees, wanted, strict=True) if flag}
        matches = tuple(zip(trees, wanted, strict=True))
        if names:
            matches = (*matches, (any_name(names), False))
        for key in keys:
            cell = meet(key, Str(matches))
            if isinstance(cell, Str) and not plainly_empty(cell):
                yield cell, both(*(_rest(part, matched) for part in one.members))


def _rest(part: Members, matched: set[Tree]) -> Goal:
    asked = [goal for tree, goal in part.patterns if tree in matched]
    return both(*asked) if asked else part.rest or ANYTHING


def any_name(names: tuple[str, ...]) -> Tree:
    """Texts that are a listed name; where there are many, those that start like one."""
    size = max(map(len, names))
    while (
        size > 1
        and len({name[:i] for name in names for i in range(1, min(size, len(name)) + 1)}) > MAX_NAME_CHARS
    ):
        size -= 1
    options: list[Tree] = []
    for name in dict.fromkeys(name[:size] for name in names):
        whole = all(len(one) <= size for one in names if one.startswith(name))
        tail: tuple[Tree, ...] = () if whole else (Repeat(Chars(ALL), 0, None),)
        options.append(Seq((*(Chars(of(character)) for character in name), *tail)))
    return Seq((Edge(True), Either(tuple(options)), Edge(False)))
