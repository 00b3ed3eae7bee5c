"""What the searches of rounds share: devices with an abstract model; round_host.py has what is around them.

The model's next token is a function of all tokens before it. The drafter is right about the first `right`
tokens of a draft and wrong about the next one, as chance will have it; how many rows are verified is chance,
too, within what the round and the ranks' agreement allow. What caches hold is what was written to them,
rejected rows included, so a position too many or too few shows in the tokens that follow.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from engine.actors.round import (
    Accepted,
    Begin,
    Bind,
    Committed,
    Drafted,
    Failed,
    Injected,
    LaidOut,
    MaskBegun,
    MaskRead,
    MaskReady,
    Round,
    Verified,
)

TOKENS = 3
DRAFTED = 2
"""Tokens of a draft."""


def next_token(tokens: list[int]) -> int:
    """The model: every token decides, the last one alone would be too forgiving."""
    return sum((place + 1) * token for place, token in enumerate(tokens)) * 2 % TOKENS


def run_of(slot: int, generation: int, prompt: int, length: int) -> list[int]:
    """Plain decoding of this request up to `length` tokens."""
    tokens = [(slot + generation + place) % TOKENS for place in range(prompt)]
    while len(tokens) < length:
        tokens.append(next_token(tokens))
    return tokens


class Group(NamedTuple):
    """A request in a step; prompt: rows of its chunk, 0 where it decodes."""

    slot: int
    generation: int
    prompt: int
    cap: int
    ends_at: int
    constrained: bool


class Step(NamedTuple):
    """Host -> device. rows: agreed rows of each rank."""

    epoch: int
    groups: tuple[Group, ...]
    budget: int
    rows: tuple[int, ...]


class Go(NamedTuple):
    """Chance -> device: right tokens of each group's draft, rows that each group verifies."""

    rights: tuple[int, ...]
    lens: tuple[int, ...]


class Chance(NamedTuple):
    """Device -> chance: most rows of each group, of all, and whether it is a chunk."""

    most: tuple[int, ...]
    least: tuple[int, ...]
    rows: int


class Wish(NamedTuple):
    """Device -> grammar: masks for these (slot, generation)."""

    epoch: int
    slots: tuple[tuple[int, int], ...]


class Masks(NamedTuple):
    """Grammar -> device: where the matchers stood; late: the device reads the mask long after."""

    epoch: int
    lengths: tuple[int, ...]
    late: bool


class Forward(NamedTuple):
    """Device -> exchange: it is at the collectives of this epoch, with so many rows."""

    epoch: int
    rows: int


class Met(NamedTuple):
    """Exchange -> device: every rank is."""


class Result(NamedTuple):
    """Device -> host: (slot, generation, tokens, committed length)."""

    epoch: int
    rows: tuple[tuple[int, int, tuple[int, ...], int], ...]


class FailAt(NamedTuple):
    """The next time that the device comes to this state it fails."""

    at: str


class BrokenError(Exception):
    """The step raised."""


class Device(Round):
    """A step runner with an abstract model.

    number  of its rank
    caches  by slot: tokens whose rows were written, at their positions
    ring    by slot: (position, token) in the order of injection
    waits   what it waits for: step, chance, ranks, masks
    """

    DATA: ClassVar[tuple[str, ...]] = (
        *Round.DATA,
        *("steps", "caches", "ring", "anchors", "drafts", "waits", "early", "fails_at"),
    )

    def __init__(self, number: int = 0) -> None:
        super().__init__(slots=3)
        self.number = number
        self.steps: list[Step] = []
        self.caches: dict[int, list[int]] = {}
        self.ring: dict[int, list[tuple[int, int]]] = {}
        self.anchors: dict[int, int] = {}
        self.drafts: list[list[int]] = []
        self.waits = "step"
        self.early: Masks | None = None
        self.fails_at = ""

    def receive(self, msg: Any) -> list[Any]:
        """A message of the host, chance, the grammars or the exchange; effects for them."""
        self._out: list[Any] = []
        try:
            if self.state != "broken":
                self._take(msg)
        except BrokenError:
            self.waits = "nothing"
        return self._out

    def _take(self, msg: Any) -> None:
        if isinstance(msg, FailAt):
            self.fails_at = msg.at
        elif isinstance(msg, Step):
            self.steps.append(msg)
            if self.waits == "step":
                self._begin()
        elif isinstance(msg, Go):
            self._draft(msg.rights)
            self._forward(msg.lens)
        elif isinstance(msg, Met):
            self._judge()
        elif self.waits == "masks":
            self._accept(msg)
        else:
            self.early = msg

    def _do(self, event: Any) -> None:
        super().receive(event)
        if self.state == self.fails_at:
            super().receive(Failed())
            raise BrokenError

    def _begin(self) -> None:
        groups = self.steps[0].groups
        for group in groups:
            if group.prompt:
                self._do(Bind(group.slot, group.generation, 0, group.ends_at))
                self.caches[group.slot], self.ring[group.slot] = [], []
        columns = [np.array(column, np.int64) for column in zip(*groups, strict=True)]
        slots, generations, chunks, caps = columns[:4] if groups else (np.zeros(0, np.int64),) * 4
        step = self.steps[0]
        self._do(Begin(step.epoch, slots, generations, chunks, caps, step.rows[self.number]))
        self.drafts = [[] for _ in groups]
        if step.budget and (self.caps > 1).any():
            self.waits = "chance"
            most, least = tuple(self.most.tolist()), tuple(self.least.tolist())
            self._out.append(Chance(most, least, self.rows))
        else:
            self._forward(tuple(self.least.tolist()))

    def _draft(self, rights: tuple[int, ...]) -> None:
        """Writes what waits to the ring, and drafts: right so far, then wrong."""
        slots = self.slots[self.caps > 1]
        first = self.injected[slots]
        rows = self.lengths[slots] - first
        for slot, begin, count in zip(slots.tolist(), first.tolist(), rows.tolist(), strict=True):
            self.ring[slot] += [(at, self.caches[slot][at]) for at in range(begin, begin + count)]
        self._do(Injected(slots, first, rows))
        for place, slot in enumerate(self.slots.tolist()):
            if self.caps[place] > 1:
                tokens = [*self.caches[slot][: self.lengths[slot]], self.anchors[slot]]
                for at in range(DRAFTED):
                    tokens.append((next_token(tokens) + (at == rights[place])) % TOKENS)
                self.drafts[place] = tokens[-DRAFTED:]
        self._do(Drafted())

    def _forward(self, lens: tuple[int, ...]) -> None:
        """Asks for masks, and comes to the collectives."""
        self._do(LaidOut(np.array(lens, np.int64)))
        wanted = [place for place, group in enumerate(self.steps[0].groups) if group.constrained]
        places = [place for place in wanted if lens[place]]
        if places:
            if self.open_mask_slot < 0:
                oldest = min(range(len(self.mask_owners)), key=lambda slot: self.mask_owners[slot] or 0)
                self._do(MaskRead(oldest))
            self._do(MaskBegun(self.open_mask_slot, np.array(places)))
            groups = [self.steps[0].groups[place] for place in places]
            self._out.append(Wish(self.epoch, tuple((g.slot, g.generation) for g in groups)))
        self.waits = "ranks"
        self._out.append(Forward(self.epoch, sum(lens)))

    def _judge(self) -> None:
        """Every verified row is in the caches, and has its logits."""
        for place, group in enumerate(self.steps[0].groups):
            slot, count = group.slot, int(self.most[place])
            tokens = [self.anchors.get(slot, 0), *self.drafts[place]][:count]
            if group.prompt:
                tokens = run_of(slot, group.generation, group.prompt, group.prompt)
            length = int(self.lengths[slot])
            self.caches[slot][length : length + count] = tokens
        self._do(Verified())
        self.waits = "masks"
        if self.state == "judging":
            self._keep()
        elif self.early is not None:
            self._accept(self.early)

    def _accept(self, masks: Masks) -> None:
        self.early = None
        held = self.mask_owners.index(self.epoch)
        self._do(MaskReady(masks.epoch, np.array(masks.lengths)))
        self._keep(-1 if masks.late else held)

    def _keep(self, mask_slot: int = -1) -> None:
        """The greedy rule, in the rows that are kept."""
        rows, kept = [], []
        for place, group in enumerate(self.steps[0].groups):
            cache, length = self.caches[group.slot], int(self.lengths[group.slot])
            tokens: list[int] = []
            if group.prompt:
                kept.append(group.prompt)
                tokens = [next_token(cache[: group.prompt])]
            else:
                judged = [next_token(cache[: length + row + 1]) for row in range(int(self.most[place]))]
                while len(tokens) < len(judged):
                    tokens.append(judged[len(tokens)])
                    if tokens[-1] != [*self.drafts[place], -1][len(tokens) - 1]:
                        break
                kept.append(len(tokens))
            rows.append((group.slot, group.generation, tuple(tokens)))
        self._do(Accepted(np.array(kept, np.int64)))
        if mask_slot >= 0:
            self._do(MaskRead(mask_slot))
        for slot, _, run in rows:
            self.anchors[slot] = run[-1] if run else self.anchors[slot]
        self._do(Committed())
        lengths = self.lengths[self.slots].tolist()
        told = tuple((*row, length) for row, length in zip(rows, lengths, strict=True))
        self._out.append(Result(self.epoch, told))
        self.steps.pop(0)
        self.waits, self.drafts = "step", []
        if self.steps:
            self._begin()
