"""The world around matchers of constrained requests: steps that keep tokens, results that race masks."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, NamedTuple

from engine.actors.core import Reply
from engine.actors.grammar_pipeline import (
    Arrived,
    Barrier,
    Began,
    Entered,
    GrammarPipeline,
    Kept,
    Leads,
    Left,
    Retained,
    Returned,
    Traversed,
)
from engine.fsm.environment import Environment, From

PROMPT = 1

AFTER = {"leading": "led", "begun": "traversing", "traversing": "ready"}
"""Stages of a step that end by themselves."""


class Heard(NamedTuple):
    """The thread has done a job; of a result, its epoch, else 0."""

    epoch: int


class Thread(GrammarPipeline):
    """The machine as its thread runs it: one job after the other."""

    def receive(self, msg: Any) -> list[Any]:
        """Effects, and word that the job is done."""
        heard = Heard(msg.epoch if isinstance(msg, Arrived) else 0)
        return [*super().receive(msg), Reply(None, heard)]


class Steps(Environment):
    """Requests that come, ride in steps and leave, and matchers that are fed what the core says.

    The token at a position is the position's number. A grammar may end with any token; the request rides in
    one step more, which had begun before that was known.

    longest   tokens of each request at its longest, prompt included
    block     most tokens that a step keeps of a request
    aborts    requests that may end at any moment between steps

    known, fed   by request: tokens it has; tokens that its matcher was given
    entered, over, gone   requests that came; that ended, with steps they still ride in; that left
    stage, epoch, riders  of the step in hand
    late      riders of the epochs whose results aren't told; telling: those on their way
    busy      the thread has a job of the steps' queue
    faulty    what must not be
    """

    DATA: ClassVar[tuple[str, ...]] = (
        *("known", "fed", "entered", "over", "gone", "stage", "epoch", "riders", "late", "faulty"),
        *("aborts", "busy", "telling"),
    )

    def __init__(self, longest: list[int], block: int = 2, aborts: list[int] | None = None) -> None:
        self.longest = tuple(longest)
        self.block = block
        self.aborts = list(aborts or [])
        self.known = [PROMPT] * len(longest)
        self.fed: list[list[int]] = [[] for _ in longest]
        self.entered: list[int] = []
        self.over: dict[int, int] = {}
        self.gone: list[int] = []
        self.stage = "idle"
        self.epoch = 0
        self.riders: tuple[int, ...] = ()
        self.late: dict[int, tuple[int, ...]] = {}
        self.telling: list[int] = []
        self.busy = False
        self.faulty = ""

    def observe(self, sender: str, effect: Any) -> list[Any]:
        """A matcher is fed."""
        assert isinstance(effect, Reply)
        if isinstance(effect.value, Heard):
            if effect.value.epoch:
                self.late = {e: riders for e, riders in self.late.items() if e != effect.value.epoch}
                self.telling.remove(effect.value.epoch)
            else:
                self.busy = False
            return []
        fed = self.fed[effect.slot]
        fed += effect.value
        if fed != list(range(PROMPT, PROMPT + len(fed))):
            self.faulty = "I1"
        return []

    # -- what may happen -----------------------------------------------------------------------

    def choices(self) -> list[Any]:
        """Requests come and leave, the step goes on, results are told."""
        # A step's results aren't told before it has said what it keeps.
        said = [epoch for epoch in self.late if epoch < max(self.late) or not self.busy]
        told = [("tell", epoch) for epoch in said if epoch not in self.telling]
        if self.busy:
            return told
        found: list[Any] = [("enter", r) for r in range(len(self.longest)) if r not in self.entered]
        found += [("leave", r) for r in self.over if self._is_done(r)]
        if self.stage in ("idle", "led"):
            if self._rides():
                found.append(("begin", 0))
                found += [("lead", 0)] if self.stage == "idle" else []
        elif self.stage in ("leading", "begun", "traversing"):
            found.append(("go", 0))
        else:
            found += [("keep", counts) for counts in itertools.product(*map(self._counts, self.riders))]
        return found + told

    def faults(self) -> list[Any]:
        """A client goes."""
        free = self.stage in ("idle", "led") and not self.busy
        return [("abort", r) for r in self.aborts if free and r in self.entered]

    def _is_done(self, request: int) -> bool:
        """No step has it, and the results of all that had it are told."""
        rides = self.over[request] or any(request in riders for riders in self.late.values())
        return not rides and request not in self.riders and request not in self.gone

    def _rides(self) -> tuple[int, ...]:
        alive = [r for r in self.entered if r not in self.over and self.known[r] < self.longest[r]]
        return tuple(sorted([*alive, *(r for r, rides in self.over.items() if rides and r not in self.gone)]))

    def _counts(self, request: int) -> list[tuple[int, bool]]:
        """What a step may keep of a request: so many tokens, and whether the last one ends the grammar."""
        if request in self.over:
            return [(0, False)]
        most = min(self.block, self.longest[request] - self.known[request])
        return [(count, end) for count in range(1, most + 1) for end in (False, True)]

    def choose(self, choice: Any) -> list[Any]:
        """Does it."""
        what, details = choice
        act = {"enter": self._enter, "leave": self._leave, "begin": self._begin, "go": self._go}
        act |= {"lead": self._lead, "keep": self._keep, "tell": self._tell, "abort": self._abort}
        sender = "results" if what == "tell" else "steps"
        self.busy = self.busy or what not in ("tell", "abort")
        return [From(sender, "masks", msg) for msg in act[what](details)]

    def _enter(self, request: int) -> list[Any]:
        self.entered = sorted([*self.entered, request])
        return [Entered(request, PROMPT)]

    def _leave(self, request: int) -> list[Any]:
        self.gone = sorted([*self.gone, request])
        return [Left(request)]

    def _abort(self, request: int) -> list[Any]:
        self.aborts.remove(request)
        if request in self.over:
            return []
        self.over = {**self.over, request: 0}
        return []

    def _begin(self, _: int) -> list[Any]:
        self.riders = self._rides()
        self.stage = "begun"
        self.epoch += 1
        return [Began(self.epoch, self.riders, tuple(self.known[r] for r in self.riders))]

    def _lead(self, _: int) -> list[Any]:
        self.riders, self.stage = self._rides(), "leading"
        return [Leads(self.epoch + 1, self.riders, tuple(self.known[r] for r in self.riders))]

    def _go(self, _: int) -> list[Any]:
        was, self.stage = self.stage, AFTER[self.stage]
        if was == "leading":
            self.riders = ()
            return [Returned(self.epoch + 1)]
        return [Barrier(self.epoch)] if was == "begun" else [Traversed(self.epoch)]

    def _keep(self, counts: tuple[tuple[int, bool], ...]) -> list[Any]:
        kept = []
        for request, (count, end) in zip(self.riders, counts, strict=True):
            first = self.known[request]
            self.known[request] += count
            if count:
                kept.append(Kept(request, first, tuple(range(first, first + count)), end))
            if request in self.over:
                self.over = {**self.over, request: 0}
            elif end or self.known[request] == self.longest[request]:
                self.over = {**self.over, request: 1 if end else 0}
        self.late = {**self.late, self.epoch: self.riders}
        self.stage, self.riders = "idle", ()
        return [Retained(self.epoch, tuple(kept))]

    def _tell(self, epoch: int) -> list[Any]:
        self.telling = sorted([*self.telling, epoch])
        return [Arrived(epoch)]


def fed_in_order(world: Any) -> bool:
    """I1: no token twice, none out of order, none left out."""
    return not world.environment.faulty


def read_matchers_have_every_token(world: Any) -> bool:
    """I1, from outside: while matchers are read, each was fed all tokens up to its anchor."""
    masks = world.cores["masks"]
    if masks.state not in ("leading", "traversing", "ready"):
        return True
    fed = world.environment.fed
    return all(
        PROMPT + len(fed[request]) == anchor
        for request, anchor in zip(masks.requests, masks.anchors, strict=True)
    )


def every_kept_token_was_fed(world: Any) -> bool:
    """At the end of a run: all that was kept has reached the matchers, by one path or the other."""
    around = world.environment
    return all(PROMPT + len(fed) == known for fed, known in zip(around.fed, around.known, strict=True))


def nobody_is_left(world: Any) -> bool:
    """At the end of a run: who has left is forgotten."""
    masks, gone = world.cores["masks"], set(world.environment.gone)
    return not gone & (set(masks.stands) | masks.over)
