"""Which rank takes which request: pure policies over what ingress knows, without a clock.

Requests that must stay together are a unit: a whole group whose client demands one rank (I3), else the
completions of one prompt. How many requests a rank has ingress knows exactly. How many tokens it holds only
the rank knows: it publishes that after each step, and between two looks ingress adds what it sent since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import PAGE_TOKENS
from engine.messages import Enqueue, Entry, RankLoad

REFRESH_S = 0.02
"""Between two looks at the published loads, at least: each replaces what was added since by an older view."""

PREFIX_PAGES = 8
"""Pages of a prompt that are compared; a longer common beginning says no more about where it is cached."""

PREFIX_KEPT = 8192
"""Beginnings that are remembered, the latest ones."""

PREFIX_SLACK = 8
"""Requests that the rank which knows a beginning may have more than the emptiest, and still gets one more."""

POLICIES = ("round_robin", "total_requests", "total_tokens", "prefix_aware")
EXPLICIT = "explicit"
"""Label of requests whose client named the rank."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Entries that go to one rank: `count` of them from place `first` on.

    route   the rank that the client demands, -1 for none
    tokens  prompt tokens of all of them
    prompt  int32[n] of the first one; `salt` of its cache
    """

    first: int
    count: int
    route: int
    tokens: int
    prompt: bytes
    salt: str


def units_of(msg: Enqueue) -> list[Unit]:
    """The units of a group, in order."""
    if msg.route != -1:
        return [_unit(msg.entries, 0, len(msg.entries), msg.route)]
    starts = [place for place, entry in enumerate(msg.entries) if entry.child == 0 or place == 0]
    stops = [*starts[1:], len(msg.entries)]
    return [_unit(msg.entries, *ends, msg.entries[ends[0]].route) for ends in zip(starts, stops, strict=True)]


def _unit(entries: Sequence[Entry], first: int, stop: int, route: int) -> Unit:
    tokens = sum(len(entry.prompt) // 4 for entry in entries[first:stop])
    return Unit(first, stop - first, route, tokens, entries[first].prompt, entries[first].cache_salt)


class Budgets:
    """Tokens of each rank, used and queued, as far as ingress can know.

    tokens     estimate by rank          seen      number of the load that it rests on, -1 for none
    sent       tokens sent to each rank  looked_s  when loads were last taken over
    """

    def __init__(self, ranks: int) -> None:
        self.tokens = [0] * ranks
        self.sent = [0] * ranks
        self.seen = [-1] * ranks
        self.looked_s = float("-inf")

    def refresh(self, loads: Sequence[RankLoad], now_s: float) -> str:
        """Takes published loads over; says whether it did: refreshed, throttled, stale; empty without loads.

        What a load can't know yet, since it was under way when the rank wrote it, is added to it.
        """
        if not loads:
            return ""
        if now_s - self.looked_s < REFRESH_S:
            return "throttled"
        news = [load for load in loads if load.number != self.seen[load.rank]]
        for load in news:
            self.seen[load.rank] = load.number
            self.tokens[load.rank] = load.tokens + max(0, self.sent[load.rank] - load.received)
        if not news:
            return "stale"
        self.looked_s = now_s
        return "refreshed"

    def after(self, loads: Sequence[RankLoad], now_s: float) -> list[int]:
        """The tokens of each rank as `refresh` would leave them; changes nothing."""
        copy = Budgets(len(self.tokens))
        copy.restore(self.snapshot())
        copy.refresh(loads, now_s)
        return copy.tokens

    def add(self, rank: int, tokens: int) -> None:
        """Tokens are on their way to a rank."""
        self.tokens[rank] += tokens
        self.sent[rank] += tokens

    def remove(self, rank: int, tokens: int) -> None:
        """A request has ended; a rank that publishes says that itself."""
        if self.seen[rank] < 0:
            self.tokens[rank] -= tokens

    def snapshot(self) -> Any:
        """What changes, for the search."""
        return tuple(self.tokens), tuple(self.sent), tuple(self.seen), self.looked_s

    def restore(self, taken: Any) -> None:
        """Back to a snapshot."""
        tokens, sent, seen, self.looked_s = taken
        self.tokens, self.sent, self.seen = list(tokens), list(sent), list(seen)


class Router:
    """Spreads units over live ranks.

    cursor  the rank that round robin takes next
    known   beginning of a prompt -> the rank that had it last; the latest ones last
    """

    def __init__(self, policy: str, ranks: int) -> None:
        self.policy = policy
        self.ranks = ranks
        self.budgets = Budgets(ranks)
        self.cursor = 0
        self.known: dict[bytes, int] = {}

    def assign(
        self, units: Iterable[Unit], live: Sequence[int], requests: Mapping[int, int], tokens: Sequence[int]
    ) -> list[int]:
        """The rank of each unit; changes nothing, so that a group can still be refused whole.

        live      ranks that take requests, ascending, at least one
        requests  of each rank, running and queued
        tokens    of each rank
        """
        draft = _Draft(self, live, requests, tokens)
        return [draft.place(unit) for unit in units]

    def note(self, units: Sequence[Unit], ranks: Sequence[int]) -> None:
        """The units were sent to these ranks."""
        for unit, rank in zip(units, ranks, strict=True):
            self.budgets.add(rank, unit.tokens)
            if self.policy == "round_robin" and unit.route == -1:
                self.cursor = (rank + 1) % self.ranks
            elif self.policy == "prefix_aware":
                for key in beginnings(unit):
                    self.known.pop(key, None)
                    self.known[key] = rank
        for key in list(self.known)[: max(0, len(self.known) - PREFIX_KEPT)]:
            del self.known[key]

    def snapshot(self) -> Any:
        """What changes, for the search."""
        return self.budgets.snapshot(), self.cursor, tuple(self.known.items())

    def restore(self, taken: Any) -> None:
        """Back to a snapshot."""
        budgets, self.cursor, known = taken
        self.budgets.restore(budgets)
        self.known = dict(known)


class _Draft:
    """Loads as they will be when the units placed so far have arrived."""

    def __init__(
        self, router: Router, live: Sequence[int], requests: Mapping[int, int], tokens: Sequence[int]
    ) -> None:
        self._policy = router.policy
        self._live = live
        self._ranks = router.ranks
        self._cursor = router.cursor
        self._requests = dict(requests)
        self._tokens = list(tokens)
        self._known = router.known
        self._new: dict[bytes, int] = {}

    def place(self, unit: Unit) -> int:
        rank = unit.route if unit.route != -1 else self._choose(unit)
        self._requests[rank] += unit.count
        self._tokens[rank] += unit.tokens
        if self._policy == "prefix_aware":
            self._new.update(dict.fromkeys(beginnings(unit), rank))
        return rank

    def _choose(self, unit: Unit) -> int:
        if self._policy == "round_robin":
            rank = min(self._live, key=lambda rank: (rank - self._cursor) % self._ranks)
            self._cursor = (rank + 1) % self._ranks
            return rank
        if self._policy == "total_tokens":
            return min(self._live, key=lambda rank: (self._tokens[rank], self._requests[rank], rank))
        emptiest = min(self._live, key=lambda rank: (self._requests[rank], rank))
        return emptiest if self._policy == "total_requests" else self._knowing(unit, emptiest)

    def _knowing(self, unit: Unit, emptiest: int) -> int:
        """The rank that had the longest common beginning, unless it is much fuller than the emptiest."""
        for key in reversed(beginnings(unit)):
            rank = self._new.get(key, self._known.get(key, -1))
            if rank in self._live:
                fuller = self._requests[rank] - self._requests[emptiest]
                return rank if fuller <= PREFIX_SLACK else emptiest
        return emptiest


def beginnings(unit: Unit) -> list[bytes]:
    """A key for each beginning of whole pages, shortest first; prompts of another salt have others."""
    page = 4 * PAGE_TOKENS
    digest = hashlib.blake2b(unit.salt.encode(), digest_size=8)
    keys = []
    for start in range(0, min(len(unit.prompt) // page, PREFIX_PAGES) * page, page):
        digest.update(unit.prompt[start : start + page])
        keys.append(digest.digest())
    return keys
