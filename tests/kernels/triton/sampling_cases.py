"""Slots, rows and logits for the sampling kernels, and what the plain code makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.triton import draws
from engine.messages import Sampling, SlotBind
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import TokenCounts
from engine.runner.sampling import Rows, Sampler
from tests.kernels.triton.cases import DEVICE, seeded

EOS = 1
PADDING = -1


class Slots:
    """One slot a request, from 1; slot 0 is nobody's."""

    def __init__(self, vocab_size: int, samplings: Sequence[Sampling]) -> None:
        device = torch.device(DEVICE)
        self.parameters = SlotParameters(len(samplings) + 1, vocab_size, (EOS,), device)
        self.counts = TokenCounts(len(samplings) + 1, vocab_size, device)
        self.numbers = tuple(range(1, len(samplings) + 1))
        self.positions = tuple(11 * slot for slot in self.numbers)
        for slot, sampling in zip(self.numbers, samplings, strict=True):
            tokens = np.asarray([3, 5, 3, 4, 4, 2], np.int32).tobytes()
            self.parameters.bind(SlotBind(slot, 0, slot, slot % 2, sampling, 3, tokens))
            if self.parameters.of(slot).penalised:
                self.counts.bind(slot, tokens, 3)

    def sample(self, logits: Tensor, slots: Sequence[int] | None = None) -> draws.Drawn:
        """By the kernels."""
        slots = self.numbers if slots is None else slots
        columns = (torch.tensor(c, dtype=torch.int64, device=DEVICE) for c in (slots, self.positions))
        return draws.sample(logits, *columns, self.parameters.floats, self.parameters.ints)

    def expect(self, logits: Tensor) -> tuple[list[int], list[bool]]:
        """Tokens and validity by the plain code."""
        chosen = Sampler(self.parameters, self.counts).choose(
            logits, Rows(self.numbers, self.positions), [self.parameters.of(slot) for slot in self.numbers]
        )
        return chosen.tokens.tolist(), chosen.valid.tolist()


def normal_logits(seed: int, rows: int, columns: int, scale: float = 2.0) -> Tensor:
    """Float32 [rows, columns]."""
    return torch.randn(rows, columns, generator=seeded(seed), device=DEVICE) * scale
