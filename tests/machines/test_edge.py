"""Ingress and detokenizer under random clients, ranks and faults: I3, I11 and the bounds hold throughout."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from engine.actors.core import Reply, Send
from engine.actors.detok import Detok
from engine.actors.ingress import Ingress, Live
from engine.actors.watched import Watched
from engine.errors import EngineError
from engine.messages import (
    FAILED,
    GOES_ON,
    LENGTH,
    Abort,
    Accepted,
    Credit,
    Delta,
    Deltas,
    Drain,
    Drained,
    Enqueue,
    Entry,
    RankDown,
    RankUp,
    RequestFailed,
    Sampling,
    StepOut,
    Stop,
    SubmitBatch,
)

RANKS, LIMIT, BUFFER = 2, 4, 2
STOP_WORD = "ab"


class Letters:
    """Token i is the byte i."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Edge(RuleBasedStateMachine):
    """The two cores with a queue each; ranks and clients are played by the rules."""

    requests = Bundle("requests")
    make_ingress = staticmethod(lambda: Ingress(RANKS, LIMIT))
    make_detok = staticmethod(lambda: Detok(Letters(), BUFFER))

    def __init__(self) -> None:
        super().__init__()
        self.ingress = self.make_ingress()
        self.detok = self.make_detok()
        self.inbox: dict[str, deque[Any]] = {"ingress": deque(), "detok": deque()}
        self.deltas: dict[int, list[Delta]] = {}
        self.untaken: dict[int, int] = {}
        self.on_rank: dict[int, int] = {}
        self.drained = 0
        self.reply: Any = None
        self.up: set[int] = set()

    def give(self, name: str, msg: Any) -> None:
        """A message to a core, at once; what it sends on waits in a queue."""
        core = self.ingress if name == "ingress" else self.detok
        for effect in core.receive(msg):
            if isinstance(effect, Reply):
                self.reply = effect.value
            elif isinstance(effect, Send):
                self.carry(effect)

    def carry(self, effect: Send) -> None:
        """One effect."""
        if effect.to in self.inbox:
            self.inbox[effect.to].append(effect.msg)
        elif isinstance(effect.msg, Deltas):
            for delta in effect.msg.items:
                self.deltas[delta.request_id].append(delta)
                self.untaken[delta.request_id] += 1
        elif isinstance(effect.msg, SubmitBatch):
            self.on_rank |= {item.request_id: int(effect.to[-1]) for item in effect.msg.items}
        elif isinstance(effect.msg, Drained):
            self.drained += 1

    @rule(
        target=requests,
        size=st.integers(1, 3),
        route=st.integers(-1, RANKS),
        stop=st.booleans(),
        children=st.booleans(),
    )
    def enqueue(self, size: int, route: int, stop: bool, children: bool) -> Any:
        """A group comes, prompts or completions of one; it is accepted whole or leaves no trace."""
        entry = Entry(sink=1, prompt=b"1234", sampling=Sampling(1), stop=(STOP_WORD,) if stop else ())
        entries = tuple(replace(entry, child=child if children else 0) for child in range(size))
        self.give("ingress", Enqueue(entries, route, "slot"))
        if isinstance(self.reply, EngineError):
            return multiple()
        assert isinstance(self.reply, Accepted)
        assert tuple(self.on_rank[request] for request in self.reply.ids) == self.reply.ranks
        assert len(set(self.reply.ranks)) == 1 or (route == -1 and not children), "I3"
        for request in self.reply.ids:
            self.deltas[request] = []
            self.untaken[request] = 0
        return multiple(*self.reply.ids)

    @rule(name=st.sampled_from(["ingress", "detok"]))
    def deliver(self, name: str) -> None:
        """The oldest message arrives."""
        if self.inbox[name]:
            self.give(name, self.inbox[name].popleft())

    @rule(rank=st.integers(0, RANKS - 1))
    def start_rank(self, rank: int) -> None:
        """A rank comes up."""
        if rank not in self.up:
            self.up.add(rank)
            self.give("ingress", RankUp(rank))

    @rule(rank=st.integers(0, RANKS - 1))
    def kill_rank(self, rank: int) -> None:
        """A rank dies; its last steps are still under way."""
        if rank in self.up:
            self.up.discard(rank)
            self.give("ingress", RankDown(rank, "killed"))

    @rule(
        request=requests,
        text=st.text("abc", min_size=1, max_size=3),
        finish=st.sampled_from([GOES_ON, GOES_ON, GOES_ON, LENGTH]),
    )
    def step(self, request: int, text: str, finish: int) -> None:
        """A rank's tokens, perhaps of a request that has ended meanwhile."""
        ids = np.array([request], np.int64).tobytes()
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32).tobytes()
        self.inbox["detok"].append(StepOut(0, 0, ids, bytes([len(text)]), tokens, bytes([finish])))

    @rule(request=requests)
    def fail(self, request: int) -> None:
        """The rank gives the request up."""
        self.inbox["detok"].append(RequestFailed(request, FAILED, 500, "broken"))

    @rule(request=requests)
    def leave(self, request: int) -> None:
        """The client goes."""
        self.give("ingress", Abort(request))

    @rule(request=requests)
    def take(self, request: int) -> None:
        """The client reads what is there."""
        if self.untaken[request]:
            self.inbox["detok"].append(Credit(request, self.untaken[request]))
            self.untaken[request] = 0

    @rule()
    def drain(self) -> None:
        """The order to drain; it is rare, since nothing is accepted afterwards."""
        if len(self.deltas) > 6:
            self.give("ingress", Drain())

    @rule()
    def stop(self) -> None:
        """The order to stop, rarer still."""
        if len(self.deltas) > 12:
            self.give("ingress", Stop())

    @invariant()
    def at_most_one_terminal_event_and_nothing_after_it(self) -> None:
        """I11, the half that holds at any moment."""
        for deltas in self.deltas.values():
            assert all(delta.finish == GOES_ON for delta in deltas[:-1])

    @invariant()
    def the_cores_own_invariants_hold(self) -> None:
        """Those of the specs."""
        assert self.ingress.groups_are_whole()
        assert self.ingress.loads_are_within_limits()
        assert self.detok.buffers_are_bounded()

    @invariant()
    def no_stop_string_is_ever_shown(self) -> None:
        """What was asked not to be shown is not shown."""
        for request, deltas in self.deltas.items():
            watched = self.detok.watched.get(request)
            if watched is not None and watched.scan.stops:
                assert STOP_WORD not in "".join(delta.text for delta in deltas)

    def teardown(self) -> None:
        """I11, the other half: at the very end every request has its terminal event."""
        self.give("ingress", Stop())
        while self.inbox["ingress"] or self.inbox["detok"]:
            self.deliver("detok")
            self.deliver("ingress")
        assert not self.ingress.live
        assert not self.detok.watched
        assert set(self.ingress.loads.values()) == {0}
        for deltas in self.deltas.values():
            assert [delta.finish for delta in deltas].count(GOES_ON) == len(deltas) - 1


class ForgetfulDetok(Detok):
    """Planted fault: an ended request stays watched."""

    def _last(self, watched: Watched, chunk: Delta) -> Delta:
        last = super()._last(watched, chunk)
        self.watched[watched.request_id] = watched
        return last


class SplittingIngress(Ingress):
    """Planted fault: a group's requests are noted on different ranks."""

    def accept(self, msg: Enqueue) -> None:
        before = set(self.live)
        super().accept(msg)
        for request in sorted(set(self.live) - before)[1:]:
            live = self.live[request]
            self.live[request] = Live(1 - live.rank, live.rid, live.group)


class QuietIngress(Ingress):
    """Planted fault: the death of a rank ends nobody's request, and neither does the end of the server."""

    def lose_rank(self, msg: RankDown) -> None:
        self.up.discard(msg.rank)

    def end_all(self, msg: Stop) -> None:
        return


BOUNDED = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEdge = Edge.TestCase
TestEdge.settings = BOUNDED


class ForgetfulEdge(Edge):
    make_detok = staticmethod(lambda: ForgetfulDetok(Letters(), BUFFER))


class SplittingEdge(Edge):
    make_ingress = staticmethod(lambda: SplittingIngress(RANKS, LIMIT))


class QuietEdge(Edge):
    make_ingress = staticmethod(lambda: QuietIngress(RANKS, LIMIT))


@pytest.mark.parametrize("planted", [ForgetfulEdge, SplittingEdge, QuietEdge])
def test_a_planted_fault_is_found(planted: type[Edge]) -> None:
    # Found, not shrunk: the shortest run is of no interest here, and costs minutes.
    found = settings(BOUNDED, max_examples=300, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, EngineError, ExceptionGroup)):
        run_state_machine_as_test(planted, settings=found)
