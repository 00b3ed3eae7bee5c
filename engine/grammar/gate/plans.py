"""Arrays and objects laid out: what may stand where, and whether anything can."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.grammar.gate.alternatives import (
    ANYTHING,
    Arr,
    Bool,
    Goal,
    Holds,
    Members,
    Null,
    Num,
    Obj,
    Str,
    both,
    holds_text,
    meet,
    members_goal,
    names_of,
    plainly_empty,
)
from engine.grammar.gate.charset import ALL, of
from engine.grammar.gate.expansion import Expansion
from engine.grammar.gate.pattern import Chars, Edge, Either, Repeat, Seq, Tree
from engine.grammar.gate.refusals import GrammarRefused

MAX_PATTERNS = 5
MAX_STATES = 2_000
MAX_UNIQUE = 8
# An open object's own keys must differ from the listed names, or a later spelling of a listed name would win.
# Exactly so up to this many characters of names; beyond, they must differ in their first ones.
MAX_NAME_CHARS = 64

Productive = Callable[[Goal], bool]
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArrPlan:
    """Arrays: goals of the first places, and of those after."""

    first: tuple[Goal, ...]
    rest: Goal
    holds: tuple[Holds, ...]
    low: int
    high: int | None
    unique: str | None

    def goal(self, place: int) -> Goal:
        """What is asked of an item whatever `contains` asks."""
        return self.first[place] if place < len(self.first) else self.rest

    def goals(self) -> Iterator[Goal]:
        """Every goal that an item may have to meet."""
        for place in range(len(self.first) + 1):
            yield self.goal(place)
            yield from (goal for goal, _ in self.options(place, (0,) * len(self.holds)))

    def options(self, place: int, counts: Counts) -> list[tuple[Goal, Counts]]:
        """(goal, counts after) for each way in which an item may count for `contains`."""
        found: list[tuple[Goal, Counts]] = [(self.goal(place), ())]
        for one, count in zip(self.holds, counts, strict=True):
            after: list[tuple[Goal, Counts]] = []
            for goal, done in found:
                more = min(count + 1, one.low if one.high is None else one.high + 1)
                if one.high is not None or more > count:
                    after.append((both(goal, one.goal), (*done, more)))
                uncounted = goal if one.high is None else both(goal, opposite(one.goal))
                after.append((uncounted, (*done, count)))
            found = after
        return found

    def accepts(self, size: int, counts: Counts) -> bool:
        """Whether an array may end here."""
        return size >= self.low and all(
            one.low <= count and (one.high is None or count <= one.high)
            for one, count in zip(self.holds, counts, strict=True)
        )

    @property
    def cap(self) -> int:
        """Sizes from here on are alike."""
        return max(1, len(self.first), self.low, self.high or 0)

    def states(
        self, productive: Productive
    ) -> dict[tuple[int, Counts], list[tuple[Goal, tuple[int, Counts]]]]:
        """Transitions between (size, counts), from those that can end; empty where the start can't."""
        start = (0, (0,) * len(self.holds))
        moves: dict[tuple[int, Counts], list[tuple[Goal, tuple[int, Counts]]]] = {}
        todo = [start]
        while todo:
            state = todo.pop()
            if state in moves:
                continue
            if len(moves) >= MAX_STATES:
                raise GrammarRefused(f"counting items needs more than {MAX_STATES} states")
            size, counts = state
            open_end = self.high is None or size < self.high
            moves[state] = [
                (goal, (min(size + 1, self.cap), after))
                for goal, after in (self.options(size, counts) if open_end else [])
                if productive(goal) and not self._too_many(after)
            ]
            todo += [target for _, target in moves[state]]
        return self._trimmed(moves)

    def _too_many(self, counts: Counts) -> bool:
        return any(
            one.high is not None and count > one.high for one, count in zip(self.holds, counts, strict=True)
        )

    def _trimmed(
        self, moves: dict[tuple[int, Counts], list[tuple[Goal, tuple[int, Counts]]]]
    ) -> dict[tuple[int, Counts], list[tuple[Goal, tuple[int, Counts]]]]:
        alive = {state for state in moves if self.accepts(*state)}
        while True:
            more = {
                state
                for state, found in moves.items()
                if state not in alive and any(to in alive for _, to in found)
            }
            if not more:
                break
            alive |= more
        return {
            state: [one for one in found if one[1] in alive]
            for state, found in moves.items()
            if state in alive
        }

    def limit(self, productive: Productive) -> int | None:
        """Most items there can be, without `contains`."""
        for place, goal in enumerate((*self.first, self.rest)):
            if not productive(goal):
                return place if self.high is None else min(place, self.high)
        return self.high

    def possible(self, productive: Productive) -> bool:
        """Whether there is any such array."""
        if self.holds:
            return (0, (0,) * len(self.holds)) in self.states(productive)
        limit = self.limit(productive)
        return limit is None or self.low <= limit


@dataclass(frozen=True, slots=True)
class ObjPlan:
    """Objects: listed members in their order, each (name, goal, required), then others (key, goal)."""

    entries: tuple[tuple[str, Goal, bool], ...]
    others: tuple[tuple[Str, Goal], ...]
    low: int
    high: int | None

    def goals(self) -> Iterator[Goal]:
        """Every goal that a member may have to meet."""
        yield from (goal for _, goal, _ in self.entries)
        yield from (goal for _, goal in self.others)

    @property
    def cap(self) -> int:
        """Counts from here on are alike."""
        return max(1, self.low, self.high or 0)

    def last(self, count: int, productive: Productive) -> tuple[int, int | None] | None:
        """(fewest, most) other members after `count` listed ones; None where the object can't end well."""
        need, room = max(0, self.low - count), None if self.high is None else self.high - count
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


Plan = Null | Bool | Num | Str | ArrPlan | ObjPlan


def opposite(goal: Goal) -> Goal:
    """The denial of a goal of one schema."""
    if not goal:
        raise GrammarRefused("contains that every item meets can't be counted from above")
    ((node, wanted),) = goal
    return ((node, not wanted),)


def array_plan(one: Arr) -> ArrPlan:
    """Arrays of an alternative."""
    size = max((len(items.first) for items in one.items), default=0)
    places = [
        both(*(items.first[i] if i < len(items.first) else items.rest for items in one.items))
        for i in range(size)
    ]
    rest = both(*(items.rest for items in one.items))
    return ArrPlan(tuple(places), rest, one.holds, one.low, one.high, one.unique)


def object_plan(one: Obj, expansion: Expansion, *, open_objects: bool) -> ObjPlan:
    """Objects of an alternative. open_objects: listed properties alone don't close an object."""
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
    return ObjPlan(tuple(entries), others, one.low, one.high)


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


def few_values(union: tuple[object, ...]) -> list[Plan] | None:
    """The single values of a union, when they are few and all are scalars."""
    found: list[Plan] = []
    for one in union:
        if isinstance(one, Null):
            found.append(one)
        elif isinstance(one, Bool):
            found += [Bool((value,)) for value in one.values]
        elif isinstance(one, Num) and one.chosen is not None:
            found += [Num((), (number,)) for number in one.chosen]
        elif isinstance(one, Str) and one.chosen is not None:
            found += [replace(Str(), chosen=(text,)) for text in one.chosen]
        else:
            return None
    distinct = {_identity(one): one for one in found}
    return list(distinct.values()) if len(distinct) <= MAX_UNIQUE else None


def _identity(one: Plan) -> object:
    return ("number", one.chosen[0].value) if isinstance(one, Num) and one.chosen else one
