"""A sampler with room for a few slots, and a way to bind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.messages import Sampling, SlotBind
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import TokenCounts
from engine.runner.sampling import Chosen, Rows, Sampler

CPU = torch.device("cpu")
EOS = 1


class Bench:
    """A sampler of `slots` slots over `vocab_size` tokens."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.parameters = SlotParameters(slots, vocab_size, (EOS,), CPU)
        self.counts = TokenCounts(slots, vocab_size, CPU)
        self.sampler = Sampler(self.parameters, self.counts)
        self.vocab_size = vocab_size

    def bind(
        self,
        slot: int,
        sampling: Sampling,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        child: int = 0,
    ) -> None:
        """Bind a slot to a request with this prompt, and output from before a retraction."""
        tokens = np.asarray((*prompt, *output), np.int32).tobytes()
        bind = SlotBind(slot, 0, slot, child, sampling, len(prompt), tokens)
        self.parameters.bind(bind)
        if self.parameters.of(slot).penalised:
            self.counts.bind(slot, tokens, len(prompt))

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Chosen:
        """One token for each slot."""
        return self.sampler.sample(logits, Rows(tuple(slots), tuple(positions)))

    def draws(self, logits: Tensor, slot: int, count: int, first: int = 10_000) -> Tensor:
        """`count` tokens of one slot at successive positions, all from the same logits."""
        found = []
        for start in range(first, first + count, 1000):
            positions = range(start, min(start + 1000, first + count))
            rows = logits.expand(len(positions), -1)
            found.append(self.sample(rows, [slot] * len(positions), positions).tokens)
        return torch.cat(found)


@pytest.fixture
def bench() -> Bench:
    """Eight slots over 64 tokens."""
    return Bench(8, 64)


@pytest.fixture
def wide_bench() -> Bench:
    """Eight slots over 8192 tokens, the shipped model's vocabulary."""
    return Bench(8, 8192)
