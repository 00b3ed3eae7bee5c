"""From trees to automata: Thompson's construction, then sets of its states, each the bits of a number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from engine.grammar.gate import charset
from engine.grammar.gate.automaton import MAX_NFA, Dfa, explore
from engine.grammar.gate.charset import Ranges
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.tree import Chars, Edge, Either, Repeat, Seq, Tree
from engine.grammar.gate.work import spend


class _Nfa:
    """Thompson's construction, with edges that pass only at the start or the end of the text."""

    def __init__(self, tree: Tree) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.jumps: list[list[tuple[str, int]]] = []
        self.start, self.end = self._state(), self._state()
        self._add(tree, self.start, self.end)

    def _state(self) -> int:
        if len(self.moves) >= MAX_NFA:
            raise GrammarRefused(f"a pattern needs more than {MAX_NFA} states")
        self.moves.append([])
        self.jumps.append([])
        return len(self.moves) - 1

    def _add(self, tree: Tree, start: int, end: int) -> None:
        if isinstance(tree, Chars):
            self.moves[start].append((tree.ranges, end))
        elif isinstance(tree, Edge):
            self.jumps[start].append(("start" if tree.at_start else "end", end))
        elif isinstance(tree, Either):
            for option in tree.options:
                self._add(option, start, end)
        elif isinstance(tree, Seq):
            at = start
            for part in tree.parts:
                after = self._state()
                self._add(part, at, after)
                at = after
            self.jumps[at].append(("", end))
        else:
            # Lookaheads are automata of their own.
            assert isinstance(tree, Repeat)
            self._repeat(tree, start, end)

    def _repeat(self, tree: Repeat, start: int, end: int) -> None:
        at = start
        for _ in range(tree.low):
            after = self._state()
            self._add(tree.item, at, after)
            at = after
        if tree.high is None:
            loop, back = self._state(), self._state()
            self.jumps[at].append(("", loop))
            self._add(tree.item, loop, back)
            self.jumps[back].append(("", loop))
            self.jumps[loop].append(("", end))
            return
        for _ in range(tree.high - tree.low):
            self.jumps[at].append(("", end))
            after = self._state()
            self._add(tree.item, at, after)
            at = after
        self.jumps[at].append(("", end))

    def reached(self, states: Iterable[int], passable: tuple[str, ...] = ("",)) -> set[int]:
        """States reached without a character; edges pass where they are in `passable`."""
        todo = list(states)
        seen = set(todo)
        while todo:
            for kind, target in self.jumps[todo.pop()]:
                if target not in seen and kind in passable:
                    seen.add(target)
                    todo.append(target)
        spend(len(seen) // SPENT)
        return seen

    def marked(self, states: Iterable[int]) -> int:
        """The states as bits; those that only lead on are left out."""
        kept = (one for one in states if self.moves[one] or one == self.end or ("end" in self._kinds(one)))
        return sum(1 << one for one in kept)

    def _kinds(self, state: int) -> list[str]:
        return [kind for kind, _ in self.jumps[state]]


SPENT = 64
"""States that are looked at, or sets of them that are united, for one step of work."""


class _Subsets:
    """Sets of states of an automaton, each as the bits of one number, and what they move to.

    A set that accepts whatever follows is that alone: nothing else in it makes a difference.
    """

    def __init__(self, nfa: _Nfa) -> None:
        after = {target for moves in nfa.moves for _, target in moves}
        closures = {target: nfa.marked(nfa.reached([target])) for target in after}
        self._parts = _Alphabet({ranges for moves in nfa.moves for ranges, _ in moves})
        self._moves = [
            [(self._parts.members[ranges], closures[target]) for ranges, target in moves]
            for moves in nfa.moves
        ]
        ends = [one for one, jumps in enumerate(nfa.jumps) if any(kind == "end" for kind, _ in jumps)]
        may_end = [one for one in ends if nfa.end in nfa.reached([one], ("", "end"))]
        self.accepting = nfa.marked([*may_end, nfa.end])
        self._universal = sum(
            1 << one
            for one, moves in enumerate(nfa.moves)
            if any(
                ranges == charset.ALL and closures[target] >> one & 1 and closures[target] & self.accepting
                for ranges, target in moves
            )
        )
        self.accepting |= self._universal
        first = nfa.reached([nfa.start], ("", "start"))
        self.first = self._canonical(nfa.marked(first))
        self.accepts_nothing = nfa.end in nfa.reached([nfa.start], ("", "start", "end"))

    def row(self, state: int) -> list[tuple[int, int, int]]:
        """(first character, last, target) of what a set moves to."""
        targets = [0] * self._parts.count
        united = 0
        for one in _bits(state):
            for members, closure in self._moves[one]:
                united += len(members)
                for part in members:
                    targets[part] |= closure
        spend(united // SPENT)
        targets = [self._canonical(target) for target in targets]
        return [(low, high, targets[part]) for low, high, part in self._parts.ranges if targets[part]]

    def _canonical(self, state: int) -> int:
        endless = state & self._universal
        return endless & -endless or state


class _Alphabet:
    """Characters that no set of a pattern tells apart, as parts numbered from 0.

    ranges   (first character, last, part), ascending
    members  of each set, the parts that make it up
    """

    def __init__(self, sets: set[Ranges]) -> None:
        self.members: dict[Ranges, list[int]] = {one: [] for one in sets}
        edges = {charset.LAST + 1} | {edge for one in sets for low, high in one for edge in (low, high + 1)}
        self.ranges: list[tuple[int, int, int]] = []
        parts: dict[frozenset[Ranges], int] = {}
        active: set[Ranges] = set()
        opens: dict[int, list[Ranges]] = {}
        closes: dict[int, list[Ranges]] = {}
        for one in sets:
            for low, high in one:
                opens.setdefault(low, []).append(one)
                closes.setdefault(high + 1, []).append(one)
        ordered = sorted(edges)
        for low, after in itertools.pairwise(ordered):
            active = (active - set(closes.get(low, ()))) | set(opens.get(low, ()))
            if not active:
                continue
            part = parts.setdefault(frozenset(active), len(parts))
            self.ranges.append((low, after - 1, part))
        self.count = len(parts)
        for held, part in parts.items():
            for one in held:
                self.members[one].append(part)


def _bits(number: int) -> Iterator[int]:
    """Places of the bits that are set, ascending."""
    text = bin(number)[:1:-1]
    at = text.find("1")
    while at >= 0:
        yield at
        at = text.find("1", at + 1)


def from_tree(tree: Tree) -> Dfa:
    """All texts in which the tree is found, anywhere unless it has edges."""
    anything = Repeat(Chars(charset.ALL), 0, None)
    subsets = _Subsets(_Nfa(Seq((anything, tree, anything))))
    # The empty text alone is at its start and at its end at once, so its state is one of its own.
    first = -1

    def row(state: int) -> list[tuple[int, int, int]]:
        return subsets.row(subsets.first if state == first else state)

    def accepts(state: int) -> bool:
        return subsets.accepts_nothing if state == first else bool(state & subsets.accepting)

    return explore(first, row, accepts)
