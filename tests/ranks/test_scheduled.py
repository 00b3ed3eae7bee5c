"""Two schedulers over ranks that share the experts: every text is the one that a single rank gives."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from engine.actors.core import Run, Send
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.messages import Abort, RequestFailed, Sampling, StepOut, Stop, Submit, SubmitBatch
from engine.model.groups import ALONE
from tests.ranks.workers import RANKS, SMALL, Build, Workers, runner_of

BUILD = Build(tuple(SMALL.items()), split_head=True)


def setup_of(rank: int, ranks: int, chunk_tokens: int) -> RankSetup:
    """A rank for `runner_of`'s cache; the size of chunks may differ between ranks."""
    return RankSetup(
        rank=rank, ranks=ranks, slots=4, queued=16, chunk_tokens=chunk_tokens, context_tokens=1024,
        window_tokens=128, full_pages=30, window_pages=30, eos_ids=(1,), watchdog_ms=60_000,
    )  # fmt: skip


class Engine:
    """Schedulers, their devices, the wires between them; whatever can happen does, ranks in turn."""

    def __init__(self, devices: Any, chunks: tuple[int, ...]) -> None:
        self.devices = devices
        self.ranks = [Rank(setup_of(rank, len(chunks), chunk)) for rank, chunk in enumerate(chunks)]
        self.jobs: list[deque[Any]] = [deque() for _ in chunks]
        self.mail: deque[tuple[int, object]] = deque()
        self.text: dict[int, list[int]] = {}
        self.failed: dict[int, str] = {}
        self.modes: set[tuple[str, ...]] = set()

    def tell(self, rank: int, msg: object) -> None:
        self.mail.append((rank, SubmitBatch((msg,)) if isinstance(msg, Submit) else msg))
        while self.mail:
            to, told = self.mail.popleft()
            for effect in self.ranks[to].receive(told):
                if isinstance(effect, Run):
                    self.jobs[to].append(effect.job)
                elif isinstance(effect, Send) and effect.to.startswith("rank"):
                    self.mail.append((int(effect.to[4:]), effect.msg))
                elif isinstance(effect, Send):
                    self._hear(effect.msg)

    def _hear(self, msg: object) -> None:
        if isinstance(msg, RequestFailed):
            self.failed[msg.request_id] = msg.message
        elif isinstance(msg, StepOut):
            tokens = np.frombuffer(msg.token_ids, np.int32).tolist()
            ids = np.frombuffer(msg.request_ids, np.int64).tolist()
            for request_id, count in zip(ids, msg.counts, strict=True):
                self.text.setdefault(request_id, []).extend(tokens[:count])
                del tokens[:count]

    def step(self) -> bool:
        """The oldest step of every rank, all at once; False where nothing runs any more."""
        if not any(self.jobs):
            return False
        jobs = [queue.popleft() for queue in self.jobs]
        self.modes.add(tuple(job.mode for job in jobs))
        for rank, done in enumerate(self.devices(jobs)):
            self.tell(rank, done)
        return True


def submit(request_id: int, prompt: int, most: int, **how: Any) -> Submit:
    tokens = np.random.default_rng(request_id).integers(2, 256, prompt).astype(np.int32)
    how = {"temperature": 0.0, "ignore_eos": True, **how}
    return Submit(request_id, tokens.tobytes(), Sampling(most, **how))


TRAFFIC: dict[int, tuple[tuple[int, Submit], ...]] = {
    0: ((0, submit(1, 300, 8)),),
    2: ((1, submit(2, 40, 30)), (1, submit(3, 5, 4, prompt_logprobs=1))),
    6: ((0, submit(4, 200, 3, seed=3, temperature=0.9)), (1, submit(5, 9, 5, logit_bias=((256, 1.0),)))),
    20: ((0, submit(6, 60, 6)), (0, submit(7, 1, 9, logprobs=2)), (0, submit(8, 130, 2))),
    25: ((1, submit(9, 400, 50)),),
}


def test_texts_are_those_of_one_rank(workers: Workers) -> None:
    """I2, I9, I15: chunks of another size on each rank, idle spells of both, a bad request, one given up."""
    workers.both("build", BUILD)
    engine = Engine(lambda jobs: workers.each([("execute", job) for job in jobs]), (200, 96))
    number = 0
    while engine.step() or number <= max(TRAFFIC):
        for rank, item in TRAFFIC.get(number, ()):
            engine.tell(rank, item)
        if number == 40:
            engine.tell(1, Abort(9))
        number += 1
    modes = {("decode", "extend"), ("decode", "mixed"), ("extend", "decode"), ("decode", "idle")}
    assert modes <= engine.modes
    model = replace(BUILD, split_head=False).model(ALONE)
    for items in TRAFFIC.values():
        for _, item in items:
            runner = runner_of(model)
            alone = Engine(lambda jobs, runner=runner: [runner.execute(job) for job in jobs], (1024,))
            alone.tell(0, item)
            while alone.step():
                pass
            text = engine.text.get(item.request_id, [])
            expected = alone.text.get(item.request_id, [])
            assert text == expected[: len(text)]
            assert len(text) == len(expected) or item.request_id == 9
    assert engine.failed == {5: "logit_bias names token 256, the vocabulary has 256", 9: "aborted"}
    for rank in range(RANKS):
        engine.tell(rank, Stop())
    assert [core.state for core in engine.ranks] == ["stopped"] * RANKS
