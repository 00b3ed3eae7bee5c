"""The host, the grammars, chance and the exchange around devices of `round.py`.

The host plans a step for all ranks at once, with one in flight: it knows lower bounds of lengths alone, and
learns what was kept when it takes a result. A matcher advances over what the host retained; masks for a step
are made when every result of the steps before it is taken and advanced over (the barrier).
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, NamedTuple

from engine.actors.core import Send
from engine.fsm.environment import Environment
from specs.search.round import DRAFTED, Chance, Forward, Go, Group, Masks, Met, Result, Step, Wish, run_of

IN_FLIGHT = 2


class Request(NamedTuple):
    """What a client wants: prompt tokens, tokens at its longest, tokens at which EOS comes (0: never)."""

    rank: int
    slot: int
    prompt: int
    ends_at: int
    eos_at: int
    constrained: bool


class Place(NamedTuple):
    """A slot as the host sees it: which of its requests, tokens known, steps in flight, if it goes on."""

    number: int = 0
    known: int = 0
    flights: int = 0
    on: bool = False


class Matcher(NamedTuple):
    """A grammar's state: tokens behind it, whether its end was among them."""

    generation: int
    length: int
    ended: bool = False


class Around(Environment):
    """Everything but the devices.

    requests  lists as `Request`; those of one slot in order, the next one with the next generation
    budgets   what the host may choose from for a step; -1: every row
    barrier, once  False: the masks don't wait; a result is advanced over again by the mask source

    epoch     of the next step
    places, matchers  by (rank, slot)
    results   by rank, not taken; gains: (slot, generation, tokens, end) taken and not advanced over
    wishes    masks to be made by rank; chances: choices to be made by rank; there: ranks at the forward
    over      (rank, slot, generation) whose matcher had ended when masks were made
    faulty    what must not be
    """

    DATA: ClassVar[tuple[str, ...]] = (
        *("epoch", "places", "matchers", "results", "gains", "wishes", "chances", "there", "over", "faulty"),
        "flying",
    )

    def __init__(
        self, requests: list[list[int]], ranks: int = 1, budgets: list[int] | None = None,
        late: bool = False, barrier: bool = True, once: bool = True,
    ) -> None:  # fmt: skip
        self.requests: dict[tuple[int, int], list[Request]] = {}
        for values in requests:
            request = Request(*values[:5], bool(values[5]))
            self.requests.setdefault((request.rank, request.slot), []).append(request)
        self.budgets = tuple(budgets or [DRAFTED])
        self.reads = (False, True) if late else (False,)
        self.barrier, self.once = barrier, once
        self.epoch = 1
        self.places = {key: Place(known=listed[0].prompt) for key, listed in self.requests.items()}
        self.matchers: dict[tuple[int, int], Matcher] = {}
        self.results: list[list[Result]] = [[] for _ in range(ranks)]
        self.gains: list[list[tuple[int, int, int, bool]]] = [[] for _ in range(ranks)]
        self.flying = [0] * ranks
        self.wishes: list[Wish | None] = [None] * ranks
        self.chances: list[Chance | None] = [None] * ranks
        self.there: list[tuple[int, int]] = []
        self.agreed: tuple[int, ...] = ()
        self.over: list[tuple[int, int, int]] = []
        self.faulty = ""

    # -- what devices tell ---------------------------------------------------------------------

    def observe(self, sender: str, msg: Any) -> list[Any]:
        """Each waits here for its turn, but the exchange answers when all are there."""
        rank = int(sender[-1])
        if isinstance(msg, Result):
            self.results[rank].append(msg)
            for slot, generation, tokens, _ in msg.rows:
                if tokens and (rank, slot, generation) in self.over:
                    self.faulty = "I6"
        elif isinstance(msg, Wish):
            self.wishes[rank] = msg
        elif isinstance(msg, Chance):
            self.chances[rank] = msg
        elif isinstance(msg, Forward):
            self.there.append((rank, msg.epoch))
            if len(self.there) == len(self.results):
                if len({epoch for _, epoch in self.there}) > 1:
                    self.faulty = "I9"
                self.there = []
                return [Send(f"device{other}", Met()) for other in range(len(self.results))]
        return []

    # -- what may happen -----------------------------------------------------------------------

    def choices(self) -> list[Any]:
        """The host plans or takes a result; a matcher advances or makes masks; chance decides."""
        found: list[Any] = []
        if max(self.flying) < IN_FLIGHT and any(self._wants(key) for key in self.places):
            found += [("plan", budget) for budget in self.budgets]
        for rank in range(len(self.results)):
            if self.results[rank]:
                found.append(("take", rank))
            if self.gains[rank]:
                found.append(("advance", rank))
            if self.wishes[rank] and not (self.barrier and (self.results[rank] or self.gains[rank])):
                found += [("mask", rank, late) for late in self.reads]
            chance = self.chances[rank]
            if chance is not None:
                found += [("go", rank, *drawn) for drawn in _draws(chance)]
        return found

    def choose(self, choice: Any) -> list[Any]:
        """Does it."""
        what, *details = choice
        act = {"plan": self._plan, "take": self._take, "advance": self._advance, "mask": self._mask}
        if what == "go":
            rank, rights, lens = details
            self.chances[rank] = None
            return [Send(f"device{rank}", Go(rights, lens))]
        return act[what](*details) or []

    # -- the host ------------------------------------------------------------------------------

    def _wants(self, key: tuple[int, int]) -> bool:
        """Whether a step may do something for the slot: each step in flight brings at least one token."""
        place = self.places[key]
        if not place.on:
            return not place.flights and place.number < len(self.requests[key])
        return place.known + place.flights < self.requests[key][place.number].ends_at

    def _plan(self, budget: int) -> list[Any]:
        groups: list[list[Group]] = [[] for _ in self.results]
        for key in sorted(self.places):
            if self._wants(key):
                groups[key[0]].append(self._group(key))
        rows = []
        for own in groups:
            drafted = sum(group.cap - 1 for group in own if group.cap)
            extra = drafted if budget < 0 else min(drafted, budget)
            rows.append(sum(group.prompt or 1 for group in own) + extra)
        steps = [Step(self.epoch, tuple(own), budget, tuple(rows)) for own in groups]
        self.flying = [count + 1 for count in self.flying]
        self.epoch += 1
        return [Send(f"device{rank}", step) for rank, step in enumerate(steps)]

    def _group(self, key: tuple[int, int]) -> Group:
        place = self.places[key]
        request = self.requests[key][place.number]
        begins = not place.on
        if begins:
            self.matchers[key] = Matcher(place.number + 1, request.prompt)
            place = place._replace(on=True, known=request.prompt)
        self.places[key] = place._replace(flights=place.flights + 1)
        return Group(
            request.slot, place.number + 1, request.prompt if begins else 0,
            0 if begins else DRAFTED + 1, request.ends_at, request.constrained,
        )  # fmt: skip

    def _take(self, rank: int) -> None:
        result = self.results[rank].pop(0)
        self.flying[rank] -= 1
        for slot, generation, tokens, length in result.rows:
            key = (rank, slot)
            place = self.places[key]._replace(flights=self.places[key].flights - 1)
            request = self.requests[key][place.number]
            if place.on:
                ends = min(request.eos_at or request.ends_at, request.ends_at)
                kept = tokens[: ends - place.known]
                run = run_of(slot, generation, request.prompt, place.known + len(kept))
                if list(kept) != run[place.known :]:
                    self.faulty = "I13"
                place = place._replace(known=place.known + len(kept), on=place.known + len(kept) < ends)
                if place.on and length != place.known - 1:
                    self.faulty = "lengths"
                if request.constrained:
                    self.gains[rank].append((slot, generation, len(kept), not place.on))
            if not place.on and not place.flights:
                place = Place(place.number + 1)
            self.places[key] = place

    # -- the grammars --------------------------------------------------------------------------

    def _advance(self, rank: int) -> None:
        slot, generation, count, ended = self.gains[rank].pop(0)
        matcher = self.matchers[rank, slot]
        if matcher.generation == generation:
            self.matchers[rank, slot] = Matcher(generation, matcher.length + count, ended)

    def _mask(self, rank: int, late: bool) -> list[Any]:
        wish = self.wishes[rank]
        assert wish is not None
        self.wishes[rank] = None
        if not self.once and self.gains[rank]:
            slot, _, count, _ = self.gains[rank][0]
            matcher = self.matchers[rank, slot]
            self.matchers[rank, slot] = matcher._replace(length=matcher.length + count)
        lengths = []
        for slot, generation in wish.slots:
            matcher = self.matchers[rank, slot]
            lengths.append(-1 if matcher.ended else matcher.length)
            if matcher.ended and (rank, slot, generation) not in self.over:
                self.over = sorted([*self.over, (rank, slot, generation)])
        return [Send(f"device{rank}", Masks(wish.epoch, tuple(lengths), late))]


def _draws(chance: Chance) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(right tokens, rows) of each group, within what its rows and the step's may be."""
    each = [
        [
            (right, rows)
            for rows in range(least, most + 1)
            # Beyond the rows that are verified, right and wrong make no difference.
            for right in (range(rows) if least == 1 and most > 1 else (0,))
        ]
        for least, most in zip(chance.least, chance.most, strict=True)
    ]
    drawn = []
    for groups in itertools.product(*each):
        lens = tuple(rows for _, rows in groups)
        if sum(lens) <= chance.rows:
            drawn.append((tuple(right for right, _ in groups), lens))
    return drawn
