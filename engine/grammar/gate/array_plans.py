"""Arrays laid out: what may stand at which place, and whether anything can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.grammar.gate.alternatives import Arr, Goal, Holds, both
from engine.grammar.gate.refusals import GrammarRefused

MAX_STATES = 2_000

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
