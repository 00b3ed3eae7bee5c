"""A schema as a union: each alternative is one JSON type with all that is asked of it.

A goal is a conjunction of schemas, each asked or denied; the goal without any is met by every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.grammar.gate import automaton
from engine.grammar.gate.automaton import Dfa
from engine.grammar.gate.charset import ALL
from engine.grammar.gate.document import Node
from engine.grammar.gate.nfa import from_tree
from engine.grammar.gate.numbers import Number, Signed, spellings
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.tree import Ahead, Chars, Edge, Repeat, Seq, Tree
from engine.grammar.gate.work import once_a_request

Goal = tuple[tuple[Node, bool], ...]
ANYTHING: Goal = ()

Matches = tuple[Tree, bool]
"""A tree that must, or must not, be found in a text."""


@dataclass(frozen=True, slots=True)
class Null:
    """null."""


@dataclass(frozen=True, slots=True)
class Bool:
    """Some of true and false, in their order."""

    values: tuple[bool, ...] = (True, False)


@dataclass(frozen=True, slots=True)
class Num:
    """Numbers that meet each condition; only the `chosen` ones where there are any."""

    conditions: tuple[Signed, ...] = ()
    chosen: tuple[Number, ...] | None = None


@dataclass(frozen=True, slots=True)
class Str:
    """Texts of `low` to `high` characters in which each tree is found, or isn't."""

    matches: tuple[Matches, ...] = ()
    chosen: tuple[str, ...] | None = None
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Holds:
    """`contains`: from `low` to `high` items meet the goal."""

    goal: Goal
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Items:
    """What one schema object asks of items: the first ones, and the rest."""

    first: tuple[Goal, ...]
    rest: Goal


@dataclass(frozen=True, slots=True)
class Arr:
    """Arrays.

    unique  JSON pointer of the keyword that wants items to differ; None where none does
    seen    how many items from the start some keyword has evaluated; None: all of them
    """

    items: tuple[Items, ...] = ()
    holds: tuple[Holds, ...] = ()
    low: int = 0
    high: int | None = None
    unique: str | None = None
    seen: int | None = 0


@dataclass(frozen=True, slots=True)
class Members:
    """What one schema object asks of members: by name, by pattern, and of names in neither.

    rest   None where the schema object says nothing about them
    named  whether it lists properties, which by default closes an object that nothing else opens
    """

    names: tuple[tuple[str, Goal], ...] = ()
    patterns: tuple[tuple[Tree, Goal], ...] = ()
    rest: Goal | None = None
    named: bool = False

    def goal(self, name: str) -> Goal:
        """What it asks of the member of that name."""
        asked = [goal for key, goal in self.names if key == name]
        asked += [goal for tree, goal in self.patterns if found_in(tree, name)]
        if not asked:
            return self.rest or ANYTHING
        return both(*asked)


@dataclass(frozen=True, slots=True)
class Need:
    """There is a member whose key is one of these texts and whose value meets the goal."""

    key: Str
    goal: Goal


@dataclass(frozen=True, slots=True)
class Seen:
    """Members that some keyword has evaluated."""

    names: frozenset[str] = frozenset()
    patterns: tuple[Tree, ...] = ()
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Obj:
    """Objects. `keys` is asked of every name, as a string."""

    members: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    keys: Goal = ANYTHING
    low: int = 0
    high: int | None = None
    needs: tuple[Need, ...] = ()
    seen: Seen = Seen()


Alternative = Null | Bool | Num | Str | Arr | Obj

EVERYTHING: tuple[Alternative, ...] = (Null(), Bool(), Num(), Str(), Arr(), Obj())


def both(*goals: Goal) -> Goal:
    """All of several goals, in order, without repeats."""
    return tuple(dict.fromkeys(part for goal in goals for part in goal))


@once_a_request
def texts_with(tree: Tree) -> Dfa:
    """Texts in which a tree is found."""
    parts = tree.parts if isinstance(tree, Seq) else (tree,)
    aheads = [one for one in parts if isinstance(one, Ahead)]
    if not aheads:
        return from_tree(tree)
    rest = Seq(tuple(one for one in parts if not isinstance(one, Ahead)))
    conditions = [(from_tree(Seq((Edge(True), one.item))), one.wanted) for one in aheads]
    return automaton.conjunction([(from_tree(rest), True), *conditions])


@once_a_request
def texts_of(matches: tuple[Matches, ...]) -> Dfa:
    """Texts that meet each match."""
    parts = [(texts_with(tree), wanted) for tree, wanted in matches]
    return parts[0][0] if len(parts) == 1 and parts[0][1] else automaton.conjunction(parts)


def texts_meeting(one: Str) -> Dfa:
    """Texts that meet an alternative's matches and lengths; lengths that are met anyway add no states."""
    dfa = texts_of(one.matches)
    if dfa.empty:
        return dfa
    shortest, longest = dfa.lengths()
    high = one.high if one.high is not None and (longest is None or longest > one.high) else None
    low = one.low if shortest < one.low else 0
    if not low and high is None:
        return dfa
    length: Tree = Seq((Edge(True), Repeat(Chars(ALL), low, high), Edge(False)))
    return texts_of((*one.matches, (length, True)))


def found_in(tree: Tree, text: str) -> bool:
    """Whether a tree is found in a text."""
    return texts_with(tree).accepts(text)


def holds_text(alternative: Str, text: str) -> bool:
    """Whether a text meets an alternative."""
    return (
        alternative.low <= len(text)
        and (alternative.high is None or len(text) <= alternative.high)
        and (alternative.chosen is None or text in alternative.chosen)
        and all(found_in(tree, text) == wanted for tree, wanted in alternative.matches)
    )


def without_marks(alternative: Alternative) -> Alternative:
    """The same, as if no keyword had evaluated anything."""
    if isinstance(alternative, Arr):
        return replace(alternative, seen=0)
    return replace(alternative, seen=Seen()) if isinstance(alternative, Obj) else alternative


def plainly_empty(alternative: Num | Str) -> bool:
    """Whether no number, or no text, meets it."""
    if alternative.chosen is not None:
        return not alternative.chosen
    if isinstance(alternative, Num):
        return bool(alternative.conditions) and spellings(alternative.conditions).empty
    try:
        if not alternative.matches:
            return False
        dfa = texts_of(alternative.matches)
        return dfa.empty or not dfa.has_length(alternative.low, alternative.high)
    except GrammarRefused:
        return False  # too large to know; it is refused, or written as it stands, where it is used


def members_goal(alternative: Obj, name: str) -> Goal:
    """What an object asks of the member of that name."""
    return both(*(one.goal(name) for one in alternative.members))


def names_of(members: Sequence[Members]) -> tuple[str, ...]:
    """Names that are listed, in order."""
    return tuple(dict.fromkeys(name for one in members for name, _ in one.names))
