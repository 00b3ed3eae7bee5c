"""Two ways to run the same steps, compared bit by bit: eagerly, and over recorded memory."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch

from engine.config import PAGE_TOKENS
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.model import DeepseekV4
from engine.runner.batch import build_batch
from engine.runner.forward import commit_step, store_relay
from engine.runner.graph_layout import GraphKey
from engine.runner.graph_path import TargetPath
from engine.runner.graph_rows import GraphPlan
from engine.runner.graphs import Graphs
from engine.runner.plan import Plan
from tests.runner.driver import int32

SLOTS, PAGES, WIDTH = 4, 30, 6
CPU = torch.device("cpu")


def keys(model: DeepseekV4) -> list[GraphKey]:
    """A few: of up to 256, 512 and 1024 tokens a request; in tiles, which are slow, one."""
    rows, pages = ((4, 8, 24), (1, 2, 4)) if model.row_tile == 1 else ((model.row_tile,), (2,))
    return [GraphKey(count, min(count, SLOTS), each, WIDTH) for count in rows for each in pages]


class Side:
    """One of two ways to run the same steps."""

    def __init__(self, model: DeepseekV4, taps: tuple[int, ...], recorded: bool) -> None:
        self.model, self.taps = model, taps
        self.state = KVState(model.config, SLOTS + 1, PAGES, PAGES, CPU, torch.float32)
        self.path = TargetPath(model, self.state)
        if recorded:
            self.path.graphs = Graphs(model, self.state, keys(model), taps, lambda text: None)

    def run(self, step: RunStep, lens: list[int], bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all rows, and the taps; commits lens and relays the best token of each last row."""
        step = msgspec.structs.replace(step, bucket=bucket)
        batch = build_batch(
            step, rank=0, row_tile=self.model.row_tile, idle_runs=False, every_logit=True, taps=self.taps,
            graph_key="", tbo_boundary=-1, cp_segments=(),
        )  # fmt: skip
        plan = self.path.plan(batch, bucket)
        assert isinstance(plan, GraphPlan if bucket else Plan)
        out = self.path.run(plan)
        commit_step(self.model, self.state, plan, out.pending, lens)
        last = torch.tensor(np.cumsum(batch.counts) - 1)
        slots = torch.tensor(batch.slots.astype(np.int64))
        store_relay(self.state, slots, out.logits.index_select(0, last).argmax(1))
        return out.logits, out.pending.taps[:, : batch.tokens.size].clone()


class Pair:
    """The same requests, steps and pages on both sides."""

    def __init__(self, model: DeepseekV4, seed: int, taps: tuple[int, ...] = ()) -> None:
        self.rng, self.model = random.Random(seed), model
        self.eager, self.recorded = Side(model, taps, False), Side(model, taps, True)
        self.lengths: dict[int, int] = {}
        self.generation = 0
        self.free = list(range(1, PAGES))
        self.held: dict[int, list[tuple[int, int, int, int]]] = {}

    def join(self, slot: int, length: int) -> None:
        """A new request in a slot, used before or not; its prompt runs eagerly on both sides."""
        self.generation += 1
        self.free += [entry[2] for entry in self.held.pop(slot, [])]
        self.held[slot], self.lengths[slot] = [], 0
        for side in (self.eager, self.recorded):
            side.state.bind(slot, self.generation)
            side.state.generations[slot] = 7
        self.step({slot: length}, {slot: length}, eager=True)

    def step(self, counts: dict[int, int], lens: dict[int, int], *, eager: bool = False) -> None:
        """Both sides run so many rows of each slot and commit so many; all that counts is compared."""
        entries = []
        for slot, count in counts.items():
            while len(self.held[slot]) * PAGE_TOKENS < self.lengths[slot] + count:
                page = self.free.pop(self.rng.randrange(len(self.free)))
                entries.append((slot, len(self.held[slot]), page, page))
                self.held[slot].append(entries[-1])
        tokens = [
            -1 if place == 0 and self.lengths[slot] and self.rng.random() < 0.5 else self.rng.randint(2, 255)
            for slot, count in counts.items()
            for place in range(count)
        ]
        step = RunStep(
            1, "decode", int32(counts), int32([7] * len(counts)), int32(self.lengths[s] for s in counts),
            int32(counts.values()), int32(tokens), bytes([1] * len(counts)),
        )  # fmt: skip
        for side in (self.eager, self.recorded):
            side.state.map_pages(np.array(entries, np.int32).reshape(-1, 4))
        bucket = 0
        if not eager:
            assert self.recorded.path.graphs is not None
            bucket = self.rng.choice([n for n in self.recorded.path.graphs.tokens if n >= len(tokens)])
        kept = [lens[slot] for slot in counts]
        wanted, found = self.eager.run(step, kept, 0), self.recorded.run(step, kept, bucket)
        assert torch.equal(wanted[0], found[0])
        assert torch.equal(wanted[1], found[1])
        self.same_caches()
        for slot, count in lens.items():
            self.lengths[slot] += count

    def same_caches(self) -> None:
        """Every row but those of the sinks, and row 0, which stays zero."""
        own, other = self.eager.state, self.recorded.state
        for name, spec in own.specs.items():
            assert torch.equal(own.pool(name)[:, spec.page_rows :], other.pool(name)[:, spec.page_rows :]), (
                name
            )
            assert other.pool(name).isfinite().all()
            if spec.space != "slot":
                assert not other.pool(name)[:, 0].any()
        assert torch.equal(own.lengths[1:], other.lengths[1:])
        assert torch.equal(own.relay[1:], other.relay[1:])


def planned(side: Side, bucket: int, token: int = 9) -> GraphPlan:
    """One row of slot 1, at position 5."""
    step = RunStep(
        1, "decode", int32([1]), int32([7]), int32([5]), int32([1]), int32([token]), b"\1", bucket=bucket
    )
    batch = build_batch(
        step, rank=0, row_tile=1, idle_runs=False, every_logit=True, taps=(), graph_key="",
        tbo_boundary=-1, cp_segments=(),
    )  # fmt: skip
    plan = side.path.plan(batch, bucket)
    assert isinstance(plan, GraphPlan)
    return plan
