"""A scheduler of a few lines: binds slots, hands out pages, runs ragged steps, commits what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import PAGE_TOKENS, KVFormat
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.runner.forward import commit_step, forward
from engine.runner.plan import plan_step


@dataclass
class Driver:
    """Runs steps of one model on its own state. Full and window pages are handed out in scrambled order.

    ranks, bucket  what all ranks agreed on for the next step, as in RunStep
    """

    model: DeepseekV4
    slots: int = 9
    pages: int = 64
    ranks: tuple[tuple[int, int, int], ...] = ()
    bucket: int = 0
    kv: KVFormat = "model"
    state: KVState = field(init=False)
    free: list[int] = field(init=False)
    mapped: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    epoch: int = 0

    def __post_init__(self) -> None:
        model = self.model
        self.state = KVState(
            model.config, self.slots, self.pages, self.pages, model.device, model.dtype, self.kv
        )
        self.free = [(i * 37) % (self.pages - 1) + 1 for i in range(self.pages - 1)]

    def bind(self, slot: int, generation: int = 1) -> None:
        """A new request in `slot`."""
        self.state.bind(slot, generation)
        self.lengths[slot], self.mapped[slot] = 0, 0

    def run(
        self,
        groups: Sequence[tuple[int, Sequence[int]]],
        lens: Sequence[int] | None = None,
        taps: tuple[int, ...] = (),
    ) -> list[Tensor]:
        """One step of (slot, new tokens) groups; commits `lens` rows of each; their logits [count, V]."""
        out, counts = self.forward(groups, taps)
        counts = [len(tokens) for _, tokens in groups]
        plan, result = out
        commit_step(self.model, self.state, plan, result.pending, lens)
        for (slot, tokens), length in zip(groups, lens or counts, strict=True):
            self.lengths[slot] += length
            assert length <= len(tokens)
        return list(result.logits.split(counts))

    def forward(self, groups: Sequence[tuple[int, Sequence[int]]], taps: tuple[int, ...] = ()):
        """The step without a commit: ((plan, output), counts)."""
        self.state.map_pages(self._pages(groups))
        counts = [len(tokens) for _, tokens in groups]
        slots = np.array([slot for slot, _ in groups], dtype=np.int32)
        step = RunStep(
            epoch=self.epoch,
            mode="mixed",
            slots=slots.tobytes(),
            generations=self.state.generations[slots].tobytes(),
            starts=np.array([self.lengths[slot] for slot, _ in groups], dtype=np.int32).tobytes(),
            counts=np.array(counts, dtype=np.int32).tobytes(),
            tokens=np.array([t for _, tokens in groups for t in tokens], dtype=np.int32).tobytes(),
            samples=np.ones(len(groups), dtype=np.uint8).tobytes(),
            ranks=self.ranks,
            bucket=self.bucket,
        )
        self.epoch += 1
        plan = plan_step(self.state, step, self.model, every_logit=True, taps=taps)
        return (plan, forward(self.model, self.state, plan)), counts

    def _pages(self, groups: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
        rows = []
        for slot, tokens in groups:
            wanted = -(-(self.lengths[slot] + len(tokens)) // PAGE_TOKENS)
            while self.mapped[slot] < wanted:
                page = self.free.pop()
                rows.append((slot, self.mapped[slot], page, self.pages - page))
                self.mapped[slot] += 1
        return np.array(rows, dtype=np.int32).reshape(-1, 4)

    def full(self, tokens: Sequence[int], chunks: Sequence[int], slot: int = 1) -> Tensor:
        """Logits [n, V] of `tokens` run through slot `slot` in chunks; the last size is repeated."""
        self.bind(slot)
        out, at, sizes = [], 0, list(chunks)
        while at < len(tokens):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            out += self.run([(slot, tokens[at : at + size])])
            at += size
        return torch.cat(out)


def build(config, weights, *, deterministic: bool = False, ops: TorchOps | None = None) -> DeepseekV4:
    """A CPU model in float32."""
    return DeepseekV4(
        config,
        weights,
        device="cpu",
        dtype=torch.float32,
        deterministic=deterministic,
        kv_rounding="none",
        ops=ops,
    )
