"""From trees to automata: Thompson's construction, then sets of its states."""

from __future__ import annotations

from collections.abc import Sequence

from engine.grammar.gate import charset
from engine.grammar.gate.automaton import MAX_NFA, Dfa, explore
from engine.grammar.gate.charset import Ranges
from engine.grammar.gate.pattern import Chars, Edge, Either, Repeat, Seq, Tree
from engine.grammar.gate.refusals import GrammarRefused


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

    def closure(self, states: frozenset[int], *, start: bool, end: bool = False) -> frozenset[int]:
        """States reached without a character."""
        seen, todo = set(states), list(states)
        while todo:
            for kind, target in self.jumps[todo.pop()]:
                if target not in seen and (
                    not kind or (kind == "start" and start) or (kind == "end" and end)
                ):
                    seen.add(target)
                    todo.append(target)
        return frozenset(seen)


def from_tree(tree: Tree) -> Dfa:
    """All texts in which the tree is found, anywhere unless it has edges."""
    anything = Repeat(Chars(charset.ALL), 0, None)
    nfa = _Nfa(Seq((anything, tree, anything)))
    first = (nfa.closure(frozenset([nfa.start]), start=True), True)

    def row(state: tuple[frozenset[int], bool]) -> list[tuple[int, int, tuple[frozenset[int], bool]]]:
        moves = [move for one in state[0] for move in nfa.moves[one]]
        return [
            (low, high, (nfa.closure(targets, start=False), False)) for low, high, targets in split(moves)
        ]

    def accepts(state: tuple[frozenset[int], bool]) -> bool:
        return nfa.end in nfa.closure(state[0], start=state[1], end=True)

    return explore(first, row, accepts)


def split(moves: Sequence[tuple[Ranges, int]]) -> list[tuple[int, int, frozenset[int]]]:
    """Overlapping moves -> disjoint ranges with all of their targets."""
    events: dict[int, list[tuple[int, bool]]] = {}
    for ranges, target in moves:
        for low, high in ranges:
            events.setdefault(low, []).append((target, True))
            events.setdefault(high + 1, []).append((target, False))
    active: dict[int, int] = {}
    found: list[tuple[int, int, frozenset[int]]] = []
    points = sorted(events)
    for point, after in zip(points, points[1:] + [charset.LAST + 1], strict=True):
        for target, opens in events[point]:
            active[target] = active.get(target, 0) + (1 if opens else -1)
        targets = frozenset(target for target, count in active.items() if count)
        if targets and point < after:
            found.append((point, after - 1, targets))
    return found
