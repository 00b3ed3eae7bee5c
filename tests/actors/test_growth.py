"""Twenty thousand requests through the cores: nothing that they allocate stays."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from api.served import load_served
from engine.actors.core import Core, Reply, Run, Send
from engine.actors.detok import Detok
from engine.actors.ingress import Ingress
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.config import Settings
from engine.messages import GOES_ON, Deltas, Enqueue, Entry, RankUp, RunStep, Sampling, StepDone, Tick
from tests.actors.trivial import TOKEN

COUNTED, TRACED, SETTLED, AT_ONCE = 14_000, 4_000, 1_000, 8
ALLOWED_BLOCKS = 1_400
"""For 14,000 requests: a tenth of one object each."""

ALLOWED_BYTES = 32 << 10
"""For 4,000 requests: 8 bytes each, less than any object has."""


class Loop:
    """Ingress, detokenizer and one rank, without shells; the device answers at once with one token a row."""

    def __init__(self, model: Path) -> None:
        tokenizer = load_served(Settings(model_path=str(model)), 0).tokenizer
        setup = RankSetup(
            rank=0, ranks=1, slots=8, queued=16, chunk_tokens=256, context_tokens=8192, window_tokens=128,
            full_pages=300, window_pages=40, eos_ids=(1,), watchdog_ms=1000,
        )  # fmt: skip
        self.cores: dict[str, Core] = {
            "ingress": Ingress(1, 24),
            "detok": Detok(tokenizer, 256),
            "rank0": Rank(setup),
        }
        self.ends = 0
        self.accepted = 0
        self._queue: deque[tuple[str, Any]] = deque()

    def tell(self, to: str, msg: Any) -> None:
        """One message from outside, and all that follows from it."""
        self._queue.append((to, msg))
        while self._queue:
            name, one = self._queue.popleft()
            if name not in self.cores:
                self._outside(one)
                continue
            for effect in self.cores[name].receive(one):
                if isinstance(effect, Send):
                    self._queue.append((effect.to, effect.msg))
                elif isinstance(effect, Run):
                    self._queue.append(("rank0", done(effect.job)))
                elif isinstance(effect, Reply):
                    self.accepted += len(effect.value.ids)

    def _outside(self, msg: Any) -> None:
        if isinstance(msg, Deltas):
            self.ends += sum(delta.finish != GOES_ON for delta in msg.items)

    def run(self, requests: int) -> None:
        """So many more, a few at once; a tick now and then."""
        prompt = np.arange(10, 20, dtype=np.int32).tobytes()
        sampling = Sampling(max_new_tokens=2, ignore_eos=True)
        for number in range(requests // AT_ONCE):
            entries = tuple(Entry(1, prompt, sampling) for _ in range(AT_ONCE))
            self.tell("ingress", Enqueue(entries, slot=number))
            if number % 50 == 0:
                self.tell("rank0", Tick(float(number), float(number)))


def done(job: RunStep) -> StepDone:
    """One token for each sampled row."""
    sampled = int(np.frombuffer(job.samples, np.uint8).sum())
    return StepDone(job.epoch, job.samples, np.full(sampled, TOKEN, np.int32).tobytes())


def test_no_allocation_stays_behind_a_request(model: Path) -> None:
    loop = Loop(model)
    loop.tell("ingress", RankUp(0))
    loop.run(SETTLED)
    gc.collect()
    before = sys.getallocatedblocks()
    loop.run(COUNTED)
    gc.collect()
    grown = sys.getallocatedblocks() - before
    assert grown < ALLOWED_BLOCKS
    # Fewer requests with every allocation traced, native ones of Python's allocators included.
    tracemalloc.start(1)
    try:
        loop.run(SETTLED)
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        loop.run(TRACED)
        gc.collect()
        last = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert last - first < ALLOWED_BYTES
    assert loop.accepted == loop.ends == 20_000
