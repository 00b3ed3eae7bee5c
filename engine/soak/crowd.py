"""Crowds: the largest requests of every kind at once, larger than any of the usual traffic.

A server that has seen some holds what it needs at its busiest: blocks of its heap, the longest tables.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from engine.soak.item import Item
from engine.soak.plan import Plan, Served

LONGEST = 2048
"""Tokens of a crowd's long prompts, and of those that are scored."""


class Largest(random.Random):
    """Draws of a plan whose prompts, outputs and counts all have their greatest size."""

    def randint(self, a: int, b: int) -> int:
        """The greatest."""
        return b


class Crowd:
    """Makes crowds.

    plan  of the largest requests
    """

    def __init__(self, seed: int, served: Served, kinds: Sequence[str]) -> None:
        most = min(LONGEST, served.context // 2)
        self.plan = Plan(seed, replace(served, long=most, scored=most), kinds, Largest)
        self._kinds = list(kinds)
        self._order = random.Random(seed)

    def items(self, completions: int) -> list[Item]:
        """Equally many requests of each kind in any order, with so many completions together."""
        items: list[Item] = []
        while sum(item.completions for item in items) < completions:
            items += [self.plan.of(kind) for kind in self._kinds]
        self._order.shuffle(items)
        return items
