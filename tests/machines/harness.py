"""Ranks with their devices, and what their clients see; every message is delivered by hand."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from engine.actors.core import Run, Send, Stop
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.messages import (
    FAILED,
    GOES_ON,
    LENGTH,
    STOP_EOS,
    STOP_TOKEN,
    Abort,
    RankLoad,
    RequestFailed,
    RunStep,
    Sampling,
    Snapshot,
    StepOut,
    Submit,
    SubmitBatch,
)
from tests.machines.drafting_device import DraftingDevice
from tests.machines.paged_device import EOS, WINDOW, PagedDevice, expected_output

CONTEXT = 1500


def setup_of(**changes: Any) -> RankSetup:
    """A small rank with short pools."""
    values: dict[str, Any] = {
        "rank": 0,
        "ranks": 1,
        "slots": 4,
        "queued": 6,
        "chunk_tokens": 300,
        "context_tokens": CONTEXT,
        "window_tokens": WINDOW,
        "full_pages": 9,
        "window_pages": 9,
        "eos_ids": (EOS,),
        "watchdog_ms": 1000,
    }
    return RankSetup(**{**values, **changes})


def submit_of(
    request_id: int, prompt: int, most: int, priority: int = 0, deadline_s: float = 0.0, **sampling: Any
) -> Submit:
    """A request with a prompt of so many tokens that asks for `most` tokens."""
    tokens = (np.arange(prompt) * 7 + request_id) % 48
    how = Sampling(most, **{"seed": request_id, **sampling})
    return Submit(
        request_id, tokens.astype(np.int32).tobytes(), how, priority=priority, deadline_s=deadline_s
    )


class Harness:
    """Ranks 0..n-1 of one setup, their devices, and the clients of all.

    jobs     steps on each device, oldest first
    wires    messages between ranks on their way, by (sender, receiver)
    text     tokens of each request as its client got them
    ends     (finish code, status) of each request's terminal events
    """

    def __init__(self, ranks: int = 1, **changes: Any) -> None:
        self.ranks = [Rank(setup_of(rank=rank, ranks=ranks, **changes)) for rank in range(ranks)]
        self.devices = [self._device(rank) for rank in range(ranks)]
        self.jobs: list[deque[RunStep]] = [deque() for _ in range(ranks)]
        self.wires: dict[tuple[int, int], deque[Any]] = {}
        self.text: dict[int, list[int]] = {}
        self.ends: dict[int, list[tuple[int, int]]] = {}
        self.outs: list[StepOut] = []
        self.submitted: dict[int, Submit] = {}
        self.aborted: set[int] = set()
        self.snapshots: list[Snapshot] = []
        self.loads: dict[int, RankLoad] = {}
        self.stopped: dict[int, str] = {}

    def _device(self, rank: int) -> PagedDevice:
        speculation = self.ranks[rank].setup.speculation
        return PagedDevice() if speculation is None else DraftingDevice(speculation.block, rank)

    @property
    def rank(self) -> Rank:
        """The first rank."""
        return self.ranks[0]

    def tell(self, msg: object, rank: int = 0) -> None:
        """A message to a rank, and what leaves it."""
        for effect in self.ranks[rank].receive(msg):
            if isinstance(effect, Run):
                self.jobs[rank].append(effect.job)
                assert len(self.jobs[rank]) <= 2
            elif isinstance(effect, Stop):
                self.stopped[rank] = effect.reason
            elif isinstance(effect, Send) and effect.to.startswith("rank"):
                self.wires.setdefault((rank, int(effect.to[4:])), deque()).append(effect.msg)
            else:
                assert isinstance(effect, Send)
                self._hear(effect.msg)

    def _hear(self, msg: object) -> None:
        if isinstance(msg, RequestFailed):
            self.ends.setdefault(msg.request_id, []).append((msg.reason, msg.status))
        elif isinstance(msg, Snapshot):
            self.snapshots.append(msg)
        elif isinstance(msg, RankLoad):
            self.loads[msg.rank] = msg
        else:
            assert isinstance(msg, StepOut)
            self.outs.append(msg)
            tokens = np.frombuffer(msg.token_ids, np.int32).tolist()
            ids = np.frombuffer(msg.request_ids, np.int64).tolist()
            for request_id, count, finish in zip(ids, msg.counts, msg.finish, strict=True):
                assert request_id not in self.ends, "I6, I11: output after the terminal event"
                self.text.setdefault(request_id, []).extend(tokens[:count])
                del tokens[:count]
                if finish != GOES_ON:
                    self.ends[request_id] = [(finish, 200)]
            assert not tokens

    def submit(self, *items: Submit, rank: int = 0) -> None:
        """Requests that arrive together."""
        self.submitted.update((item.request_id, item) for item in items)
        self.tell(SubmitBatch(items), rank)

    def abort(self, request_id: int, rank: int = 0) -> None:
        """The client is gone."""
        if request_id not in self.ends:
            self.aborted.add(request_id)
        self.tell(Abort(request_id), rank)

    def step(self, rank: int = 0) -> None:
        """The oldest step of a rank's device ends."""
        self.tell(self.devices[rank].execute(self.jobs[rank].popleft()), rank)

    def deliver(self, wire: tuple[int, int]) -> None:
        """The oldest message between two ranks arrives."""
        self.tell(self.wires[wire].popleft(), wire[1])

    def moves(self) -> list[Any]:
        """What may happen next by itself: the number of a rank whose step ends, or a wire that delivers."""
        return [rank for rank, jobs in enumerate(self.jobs) if jobs] + [
            w for w in self.wires if self.wires[w]
        ]

    def move(self, which: Any) -> None:
        """One of `moves`."""
        if isinstance(which, int):
            self.step(which)
        else:
            self.deliver(which)

    def finish(self) -> None:
        """Runs until nothing happens by itself."""
        for _ in range(50_000):
            moves = self.moves()
            if not moves:
                return
            self.move(moves[0])
        raise AssertionError("the ranks don't come to an end")

    def check_texts(self) -> None:
        """Each request saw what it would have seen alone, and one terminal event (I6, I11, I15)."""
        for request_id, item in self.submitted.items():
            ends = self.ends.get(request_id, [])
            assert len(ends) == 1, (request_id, ends)
            reason, status = ends[0]
            expected, fails = expected_output(item, CONTEXT)
            text = self.text.get(request_id, [])
            assert text == expected[: len(text)]
            if reason in (STOP_EOS, STOP_TOKEN, LENGTH):
                assert text == expected
                assert not fails
            elif reason == FAILED and status == 500:
                assert text == expected
                assert fails
            else:
                assert reason == FAILED or request_id in self.aborted

    def check_all_returned(self) -> None:
        """I10: with no request left, every page and slot is free."""
        for rank in self.ranks:
            held = rank.requests.held
            assert held.full.free == held.full.usable
            assert held.window.free == held.window.usable
            assert not held.slot.any()
