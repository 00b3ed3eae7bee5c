"""One rank against random submits, aborts and step ends; the device's tokens show every corruption as wrong text."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_device import EOS, WINDOW, PagedDevice, expected_output

from engine.actors.core import Run, Send, Stop
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.messages import (
    ABORTED,
    FAILED,
    GOES_ON,
    LENGTH,
    STOP_EOS,
    Abort,
    RequestFailed,
    RunStep,
    Sampling,
    Snapshot,
    StepOut,
    Submit,
    SubmitBatch,
    Tick,
)
from engine.messages import Stop as StopNow

CONTEXT = 1500


def setup_of(**changes: object) -> RankSetup:
    """A small rank with short pools, so that retraction is common."""
    values: dict[str, object] = {
        "rank": 0,
        "ranks": 1,
        "slots": 4,
        "queued": 6,
        "chunk_tokens": 300,
        "context_tokens": CONTEXT,
        "window_tokens": WINDOW,
        "full_pages": 8,
        "window_pages": 8,
        "eos_ids": (EOS,),
        "watchdog_ms": 1000,
    }
    return RankSetup(**{**values, **changes})  # type: ignore[arg-type]


class Harness:
    """A rank, its device, and what its clients saw."""

    def __init__(self, setup: RankSetup) -> None:
        self.rank = Rank(setup)
        self.device = PagedDevice()
        self.jobs: list[RunStep] = []
        self.text: dict[int, list[int]] = {}
        self.ends: dict[int, list[tuple[int, int]]] = {}
        self.submitted: dict[int, Submit] = {}
        self.aborted: set[int] = set()
        self.snapshots: list[Snapshot] = []
        self.stopped: list[str] = []

    def tell(self, msg: object) -> None:
        """A message and all that follows from it but step results."""
        for effect in self.rank.receive(msg):
            if isinstance(effect, Run):
                self.jobs.append(effect.job)
                assert len(self.jobs) <= 2
            elif isinstance(effect, Stop):
                self.stopped.append(effect.reason)
            else:
                assert isinstance(effect, Send)
                self._hear(effect.msg)

    def _hear(self, msg: object) -> None:
        if isinstance(msg, RequestFailed):
            self.ends.setdefault(msg.request_id, []).append((msg.reason, msg.status))
        elif isinstance(msg, Snapshot):
            self.snapshots.append(msg)
        else:
            assert isinstance(msg, StepOut)
            tokens = np.frombuffer(msg.token_ids, np.int32).tolist()
            ids = np.frombuffer(msg.request_ids, np.int64).tolist()
            for request_id, count, finish in zip(ids, msg.counts, msg.finish, strict=True):
                assert request_id not in self.ends, "I6, I11: something after the terminal event"
                self.text.setdefault(request_id, []).extend(tokens[:count])
                del tokens[:count]
                if finish != GOES_ON:
                    self.ends[request_id] = [(finish, 200)]
            assert not tokens

    def submit(self, *items: Submit) -> None:
        """Requests that arrive together."""
        self.submitted.update((item.request_id, item) for item in items)
        self.tell(items[0] if len(items) == 1 else SubmitBatch(items))

    def abort(self, request_id: int) -> None:
        """The client is gone."""
        if request_id not in self.ends:
            self.aborted.add(request_id)
        self.tell(Abort(request_id))

    def step(self) -> None:
        """The oldest step's results arrive."""
        self.tell(self.device.execute(self.jobs.pop(0)))

    def finish(self) -> None:
        """Runs until nothing is on the device."""
        for _ in range(20_000):
            if not self.jobs:
                return
            self.step()
        raise AssertionError("the rank doesn't come to an end")

    def check_texts(self) -> None:
        """Each request saw what it would have seen alone, and one terminal event (I6, I11, I15)."""
        for request_id, item in self.submitted.items():
            ends = self.ends.get(request_id, [])
            assert len(ends) == 1, (request_id, ends)
            reason, status = ends[0]
            prompt = np.frombuffer(item.prompt, np.int32).tolist()
            most = min(item.sampling.max_new_tokens, CONTEXT - len(prompt))
            expected, fails = expected_output(
                request_id, prompt, item.sampling.seed, most, item.sampling.min_new_tokens, item.sampling.ignore_eos
            )
            text = self.text.get(request_id, [])
            assert text == expected[: len(text)]
            if reason in (STOP_EOS, LENGTH):
                assert text == expected
                assert not fails
            elif reason == FAILED and status == 500:
                assert fails
                assert text == expected
            else:
                assert reason == FAILED or request_id in self.aborted


def submit_of(request_id: int, prompt: int, most: int, **more: object) -> Submit:
    """A request with a prompt of so many tokens that asks for `most` tokens."""
    priority = more.pop("priority", 0)
    deadline_s = more.pop("deadline_s", 0.0)
    tokens = (np.arange(prompt, dtype=np.int32) * 7 + request_id) % 48
    return Submit(
        request_id,
        tokens.astype(np.int32).tobytes(),
        Sampling(max_new_tokens=most, seed=request_id, **more),  # type: ignore[arg-type]
        priority=priority,  # type: ignore[arg-type]
        deadline_s=deadline_s,  # type: ignore[arg-type]
    )


class RankMachine(RuleBasedStateMachine):
    """Submits, aborts, ticks and step ends in any order."""

    @initialize(full=st.integers(3, 12), window=st.integers(3, 12), chunk=st.sampled_from([64, 256, 300, 700]))
    def begin(self, full: int, window: int, chunk: int) -> None:
        self.h = Harness(setup_of(full_pages=full, window_pages=window, chunk_tokens=chunk))
        self.ids = 0
        self.now = 0.0

    def _new(self, prompt: int, most: int, priority: int, least: int, ignores: bool) -> Submit:
        self.ids += 1
        return submit_of(
            self.ids, prompt, most, priority=priority, min_new_tokens=least, ignore_eos=ignores
        )

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 600)), min_size=1, max_size=3),
        priority=st.integers(0, 2),
        least=st.sampled_from([0, 3]),
        ignores=st.booleans(),
    )
    def submit(self, sizes: list[tuple[int, int]], priority: int, least: int, ignores: bool) -> None:
        self.h.submit(*[self._new(prompt, most, priority, least, ignores) for prompt, most in sizes])

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.h.abort(data.draw(st.integers(1, self.ids)))

    @precondition(lambda self: self.h.jobs)
    @rule(steps=st.integers(1, 200))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.h.jobs:
                self.h.step()

    @rule()
    def tick(self) -> None:
        self.now += 1.0
        self.h.tell(Tick(self.now, self.now))

    @invariant()
    def the_rank_is_sound(self) -> None:
        if hasattr(self, "h"):
            assert self.h.rank.accounts_agree()
            assert self.h.rank.flight_reads_only_what_is_held()
            assert self.h.jobs or self.h.rank.state == "idle"

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.finish()
        self.h.check_texts()
        held = self.h.rank.requests.held
        assert held.full.free == held.full.usable
        assert held.window.free == held.window.usable
        self.h.tell(StopNow())
        assert self.h.stopped == ["stopped"]


RankMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRankMachine = RankMachine.TestCase


def test_a_request_alone_is_answered_as_by_the_oracle() -> None:
    h = Harness(setup_of())
    h.submit(submit_of(1, 700, 300, ignore_eos=True))
    h.finish()
    h.check_texts()
    assert Counter(reason for ends in h.ends.values() for reason, _ in ends)[ABORTED] == 0
