"""Patterns as trees."""

from __future__ import annotations

from dataclasses import dataclass

from engine.grammar.gate.charset import Ranges


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Edge:
    """`^` or `$`: the start or the end of the whole text."""

    at_start: bool


@dataclass(frozen=True, slots=True)
class Seq:
    """Parts one after another."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of several."""

    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; None: without end."""

    item: Tree
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the text must, or must not, begin with: right behind a leading `^` alone, never in a part."""

    item: Tree
    wanted: bool


Tree = Chars | Edge | Ahead | Seq | Either | Repeat
