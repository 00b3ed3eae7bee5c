"""The searches of ranks with constrained requests: grammars that are loaded, late, or can't be."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from engine.actors.core import Send
from engine.fsm.environment import From
from engine.messages import (
    MatcherLeft,
    MatcherReady,
    MatcherWanted,
    Sampling,
    StepDone,
    Submit,
    SubmitBatch,
)
from specs.search.ranks import WORD, Devices

OVER = "over"


def constrained(request_id: int, most: int = 2, with_free: int = 0, free_most: int = 4) -> SubmitBatch:
    """A request with a grammar that ignores EOS; in company of a free one where that has an id."""
    prompt = np.full(1, WORD, np.int32).tobytes()
    sampling = Sampling(most, ignore_eos=True)
    items = (Submit(request_id, prompt, sampling, grammar=b"grammar"),)
    free = (Submit(with_free, prompt, Sampling(free_most)),) if with_free else ()
    return SubmitBatch(items + free)


class Grammars(Devices):
    """Devices, and whoever loads grammars. A step may end the grammars of its rows: the outcome `over`.

    refuses  whether a grammar may turn out not to load

    loading  requests whose grammar is being loaded      loaded  those that got their matcher
    left     those that need it no more
    """

    DATA: ClassVar[tuple[str, ...]] = (*Devices.DATA, "loading", "loaded", "left", "over")

    def __init__(self, refuses: bool = False, **devices: Any) -> None:
        super().__init__(**devices)
        self.refuses = refuses
        self.loading: list[int] = []
        self.loaded: list[int] = []
        self.left: list[int] = []
        self.over: list[int] = []

    def observe(self, sender: str, effect: Any) -> list[Any]:
        """Grammars begin to be loaded, and are left."""
        msg = effect.msg if isinstance(effect, Send) else None
        if isinstance(msg, MatcherWanted):
            self.loading.append(msg.request_id)
        elif isinstance(msg, MatcherLeft):
            request = msg.request_id
            if request in self.left or (request not in self.loading and request not in self.loaded):
                self.faulty = "left twice, or never there"
            if any(
                request == bind.request_id
                for queue in self.queues.values()
                for s in queue
                for bind in s.binds
            ):
                self.faulty = "I5"
            self.left = sorted([*self.left, request])
            self.loading = [one for one in self.loading if one != request]
        else:
            return super().observe(sender, effect)
        return []

    def choices(self) -> list[Any]:
        """As devices; a grammar is loaded, or can't be."""
        found: list[Any] = [*super().choices()]
        for request in self.loading:
            found += [("load", request), ("refuse", request)] if self.refuses else [("load", request)]
        return found

    def choose(self, choice: Any) -> list[Any]:
        """Word of it goes to the rank."""
        what, which = choice
        if what in ("load", "refuse"):
            self.loading.remove(which)
            self.loaded = sorted([*self.loaded, which])
            ready = MatcherReady(which) if what == "load" else MatcherReady(which, 500, "it can't be read")
            return [From("matchers", "rank0", ready)]
        if which != OVER:
            return super().choose(choice)
        step = self.queues[what].pop(0)
        rows = int(np.frombuffer(step.samples, np.uint8).sum())
        tokens = np.full(rows, WORD, np.int32).tobytes()
        return [Send(what, StepDone(step.epoch, step.samples, tokens, ended=step.samples))]


def only_with_a_matcher(world: Any) -> bool:
    """No step binds a constrained request that has no matcher."""
    around = world.environment
    return all(
        not bind.constrained or bind.request_id in around.loaded
        for queue in around.queues.values()
        for step in queue
        for bind in step.binds
    )


def every_matcher_is_left(world: Any) -> bool:
    """At the end of a run: whoever wanted a matcher has left it, once."""
    around = world.environment
    return not around.loading and around.loaded == [one for one in around.loaded if one in around.left]
