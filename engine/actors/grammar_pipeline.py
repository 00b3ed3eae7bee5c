"""Which tokens each matcher has behind it, and which it is owed; specs/grammar_pipeline.toml.

A step may draft first: matchers then walk ahead along the drafts, and are back before anything else is asked
of them. A step keeps tokens of constrained requests. Two paths may bring them to the matchers: the result
path, when the step's results are told, and the barrier in front of the next drafts or masks. Whoever comes
first advances; the other one finds nothing owed. Positions are counted from the request's first prompt token,
so that tokens that are computed anew after a retraction aren't advanced over again.

What a matcher is, this core doesn't know: `Reply` effects have the tokens, their slot is the request.
"""

from __future__ import annotations

import sys
from typing import ClassVar

import msgspec

from engine.actors.core import Core, Reply


class Kept(msgspec.Struct, frozen=True):
    """Tokens that a step keeps of a request.

    first  position of the first one
    ended  the last one ends the grammar
    """

    request: int
    first: int
    tokens: tuple[int, ...]
    ended: bool = False


class Entered(msgspec.Struct, frozen=True):
    """A request's matcher. position: tokens that it counts as behind it, those of the prompt."""

    request: int
    position: int


class Left(msgspec.Struct, frozen=True):
    """The request's matcher isn't used any more."""

    request: int


class Leads(msgspec.Struct, frozen=True):
    """A step drafts for these requests. anchors: as of `Began`."""

    epoch: int
    requests: tuple[int, ...]
    anchors: tuple[int, ...]


class Returned(msgspec.Struct, frozen=True):
    """The step's drafts are made."""

    epoch: int


class Began(msgspec.Struct, frozen=True):
    """A step wants masks. anchors: tokens behind the first masked row of each request, prompt included."""

    epoch: int
    requests: tuple[int, ...]
    anchors: tuple[int, ...]


class Arrived(msgspec.Struct, frozen=True):
    """The step's tokens may be advanced over."""

    epoch: int


class Barrier(msgspec.Struct, frozen=True):
    """Masks of this step come next."""

    epoch: int


class Traversed(msgspec.Struct, frozen=True):
    """Masks of this step are made."""

    epoch: int


class Retained(msgspec.Struct, frozen=True):
    """What the step keeps; requests that keep nothing are left out."""

    epoch: int
    kept: tuple[Kept, ...]


class GrammarPipeline(Core):
    """Core of specs/grammar_pipeline.toml.

    stands     request -> tokens behind its matcher      over   requests whose grammar has ended
    owed       what was kept and isn't advanced over     owing  the step that kept it
    epoch      of the last step that wanted masks    led    of the last one that drafted
    requests, anchors  of the step in hand; empty: there is none
    """

    SPEC: ClassVar[str] = "grammar_pipeline"
    MESSAGES = sys.modules[__name__]
    DATA: ClassVar[tuple[str, ...]] = (
        "stands",
        "over",
        "owed",
        "owing",
        "epoch",
        "led",
        "requests",
        "anchors",
    )

    def __init__(self) -> None:
        super().__init__()
        self.stands: dict[int, int] = {}
        self.over: set[int] = set()
        self.owed: tuple[Kept, ...] = ()
        self.owing = 0
        self.epoch = self.led = -1
        self.requests: tuple[int, ...] = ()
        self.anchors: tuple[int, ...] = ()

    # ---- requests -----------------------------------------------------------------------------

    def enter(self, msg: Entered) -> None:
        """It stands behind the prompt."""
        self.stands[msg.request] = msg.position

    def is_not_in_hand(self, msg: Left) -> bool:
        """I5: no step reads its matcher."""
        return msg.request not in self.requests

    def leave(self, msg: Left) -> None:
        """Nothing is owed to it any more."""
        self.stands.pop(msg.request, None)
        self.over.discard(msg.request)
        self.owed = tuple(kept for kept in self.owed if kept.request != msg.request)

    # ---- a step -------------------------------------------------------------------------------

    def leads_from_the_anchors(self, msg: Leads) -> bool:
        """I1: a step that hasn't drafted yet; with what is owed, each matcher has all tokens behind it."""
        return msg.epoch > self.led and self.has_their_matchers(msg) and self._reach(msg)

    def lead(self, msg: Leads) -> None:
        """Its matchers are in hand."""
        self.led, self.requests, self.anchors = msg.epoch, msg.requests, msg.anchors

    def is_led(self, msg: Returned) -> bool:
        """Whoever walked ahead for another step isn't back."""
        return msg.epoch == self.led

    def come_back(self, msg: Returned) -> None:
        """Nothing has moved."""
        self.requests = self.anchors = ()

    def has_their_matchers(self, msg: Began | Leads) -> bool:
        """A later step, and each request has entered and is named once."""
        known = all(request in self.stands for request in msg.requests)
        return known and len(set(msg.requests)) == len(msg.requests) and msg.epoch > self.epoch

    def begin(self, msg: Began) -> None:
        """Its masks come next."""
        self.epoch, self.requests, self.anchors = msg.epoch, msg.requests, msg.anchors

    def reaches_the_anchors(self, msg: Barrier) -> bool:
        """I1: with what is owed, each matcher has all tokens behind it that the step has, and no other."""
        return msg.epoch == self.epoch and self._reach(self)

    def _reach(self, step: GrammarPipeline | Leads) -> bool:
        coming = {kept.request: len(kept.tokens) for kept in self.owed}
        return all(
            self.stands[request] + coming.get(request, 0) == anchor
            for request, anchor in zip(step.requests, step.anchors, strict=True)
        )

    def advance(self, msg: Barrier | Arrived | Leads) -> None:
        """Pays what is owed, once."""
        for kept in self.owed:
            self.emit(Reply(kept.request, kept.tokens))
            self.stands[kept.request] += len(kept.tokens)
            if kept.ended:
                self.over.add(kept.request)
        self.owed = ()

    def is_of_this_step(self, msg: Traversed) -> bool:
        """Masks of another step would be wrong."""
        return msg.epoch == self.epoch

    def follows_the_anchors(self, msg: Retained) -> bool:
        """The tokens follow what the masks were made for; nothing follows the end of a grammar (I6)."""
        behind = dict(zip(self.requests, self.anchors, strict=True))
        return msg.epoch == self.epoch and all(
            behind.get(kept.request) == kept.first and kept.tokens and kept.request not in self.over
            for kept in msg.kept
        )

    def owe(self, msg: Retained) -> None:
        """For whichever path is first."""
        self.owing, self.owed = msg.epoch, msg.kept
        self.requests = self.anchors = ()

    def is_owed(self, msg: Arrived) -> bool:
        """Nobody was faster."""
        return bool(self.owed) and msg.epoch == self.owing

    # ---- invariants ---------------------------------------------------------------------------

    def read_matchers_stand_at_their_anchors(self) -> bool:
        """I1."""
        if self.state not in ("leading", "traversing", "ready"):
            return True
        return not self.owed and [self.stands[request] for request in self.requests] == [*self.anchors]

    def what_is_owed_follows(self) -> bool:
        """GP1."""
        return all(self.stands.get(kept.request) == kept.first for kept in self.owed)

    def nothing_behind_an_end(self) -> bool:
        """I6."""
        return not any(kept.request in self.over for kept in self.owed)
