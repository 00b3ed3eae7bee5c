"""Two and three ranks with random work and random delivery: equal decisions, right texts, one common end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.actors.schedule import Graphs
from engine.messages import RunStep, Stop
from tests.machines.harness import Harness, submit_of

REQUEST = st.tuples(st.integers(0, 2), st.integers(1, 600), st.integers(1, 60))


class Watched(Harness):
    """Notes which rounds each rank ran, what it decided, and what its device was told of all ranks."""

    def __init__(self, ranks: int, **changes: object) -> None:
        super().__init__(ranks, **changes)
        self.decisions: dict[int, set[object]] = {}
        self.told: dict[int, set[object]] = {}
        self.ran: list[list[int]] = [[] for _ in range(ranks)]

    def tell(self, msg: object, rank: int = 0) -> None:
        before: list[RunStep] = list(self.jobs[rank])
        super().tell(msg, rank)
        core = self.ranks[rank]
        new = [job for job in self.jobs[rank] if job not in before]
        self.ran[rank] += [job.epoch for job in new]
        for job in new:
            self.told.setdefault(job.epoch, set()).add((job.bucket, job.ranks))
            assert job.ranks[rank][1] == len(job.tokens) // 4
            assert job.ranks[rank][2] >= sum(job.samples)
        if core.decision is not None:
            self.decisions.setdefault(core.next_epoch, set()).add(core.decision)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from([2, 3]),
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    aborts=st.lists(st.integers(0, 7), max_size=2),
    order=st.randoms(use_true_random=False),
)
def test_ranks_agree_and_stop_together(
    ranks: int, requests: list[tuple[int, int, int]], aborts: list[int], order: random.Random
) -> None:
    """I2, I9, I10, I11, whatever the order in which ranks hear of each other and devices end."""
    h = Watched(ranks, graphs=Graphs(decode=(1, 2, 4), prefill=(256, 600)))
    work = [
        *(("submit", index, *request) for index, request in enumerate(requests)),
        *(("abort", index % len(requests)) for index in aborts),
    ]
    order.shuffle(work)
    while work or h.moves():
        moves = h.moves()
        if work and (not moves or order.random() < 0.05):
            _act(h, work.pop(), requests, ranks)
        else:
            h.move(order.choice(moves))
    h.check_texts()
    h.check_all_returned()
    assert all(len(decisions) == 1 for decisions in h.decisions.values())
    assert all(len(told) == 1 for told in h.told.values())
    assert all(ran == h.ran[0] for ran in h.ran)
    for rank in order.sample(range(ranks), ranks):
        h.tell(Stop(), rank)
        for _ in range(order.randrange(4)):
            if h.moves():
                h.move(order.choice(h.moves()))
    h.finish()
    assert h.stopped == dict.fromkeys(range(ranks), "stopped")


def _act(h: Harness, work: tuple[object, ...], requests: list[tuple[int, int, int]], ranks: int) -> None:
    kind, index = work[0], work[1]
    assert isinstance(index, int)
    rank, prompt, most = requests[index]
    if kind == "submit":
        h.submit(submit_of(index + 1, prompt, most), rank=rank % ranks)
    else:
        if index + 1 not in h.ends:
            h.aborted.add(index + 1)
        h.abort(index + 1, rank=rank % ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_idle_rank_runs_every_round_that_another_one_runs(ranks: int) -> None:
    h = Watched(ranks)
    h.submit(submit_of(1, 10, 20, ignore_eos=True))
    h.finish()
    h.check_texts()
    assert len(h.ran[0]) == 20
    assert all(ran == h.ran[0] for ran in h.ran)
