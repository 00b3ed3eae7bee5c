"""Decode and verify steps over memory that never moves: captured once a size on a device, then replayed.

What is captured is the layers, from token ids to streams; a head that is captured would read padded rows, and
commits wait for what is accepted. All sizes share one set of buffers, as large as the largest needs, and on a
device one pool, since no two of them run at once. A replay on the CPU is the same function, called again over
the same buffers: what differs between the two is the capture alone.

Which size runs follows from the bucket that the ranks agreed on, and from this rank's requests. Collectives
have shapes by the bucket, so ranks whose requests are longer than others' still meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.config import PAGE_TOKENS
from engine.errors import ShapeMismatch
from engine.memory.pools import KVState
from engine.model.model import DeepseekV4
from engine.model.step import Pending, StepOutput, StepRows
from engine.runner.batch import ForwardBatch
from engine.runner.columns import Upload
from engine.runner.draft_graphs import RecordedDrafter
from engine.runner.forward import wanted_logits
from engine.runner.graph_layout import GraphKey, blank, length, views
from engine.runner.graph_rows import GraphPlan, pack, unfold
from engine.runner.recorded import Recorded

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

SHORTEST = 16
"""Pages of the smallest size: below 4096 tokens nothing is gained by a smaller one."""
TIER = 4
"""From one size of pages to the next. A step pays for entries that its requests don't have, at most three
times those that they have; a start for each capture: five sizes up to a million tokens, not nine."""


def token_sizes(most: int, row_tile: int) -> tuple[int, ...]:
    """Ascending sizes up to `most` rows, a third of padding at most, each a multiple of row_tile."""
    sizes, size = {most}, 1
    while size < most:
        sizes |= {size, min(most, size * 3 // 2)}
        size *= 2
    return tuple(sorted({-(-size // row_tile) * row_tile for size in sizes}))


def page_sizes(longest: int) -> tuple[int, ...]:
    """Ascending sizes of pages, each TIER times the one before, the last one `longest`."""
    sizes, size = [], SHORTEST
    while size < longest:
        sizes.append(size)
        size *= TIER
    return (*sizes, longest)


def graph_keys(most: int, slots: int, width: int, longest: int, row_tile: int) -> tuple[GraphKey, ...]:
    """Every size of steps of up to `most` rows, largest first; any such step of the rank fits one.

    slots    most requests of a step
    width    most rows of a request
    longest  most pages of a request
    """
    tokens, pages = token_sizes(most, row_tile), page_sizes(longest)
    return tuple(
        GraphKey(rows, min(rows, slots), each, width) for rows in tokens[::-1] for each in pages[::-1]
    )


class Buffers:
    """What every recorded step reads and writes besides the caches; as large as the largest key needs."""

    def __init__(self, model: DeepseekV4, keys: Sequence[GraphKey], taps: int) -> None:
        config, device = model.config, model.device
        rows = max(key.tokens for key in keys)
        self._pending = model.new_pending(rows, taps)
        self.packed = torch.zeros(max(length(key, config) for key in keys), dtype=torch.int64, device=device)
        self._streams = torch.zeros(
            rows, config.hc_mult, config.hidden_size, dtype=model.dtype, device=device
        )

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.packed, self._streams, self._pending.c4, self._pending.c128, self._pending.taps

    def streams(self, rows: int) -> Tensor:
        """[rows, hc, H]."""
        return self._streams[:rows]

    def pending(self, rows: int) -> Pending:
        """Of a step of so many rows, contiguous."""
        own = self._pending
        return Pending(*(_front(part, rows) for part in (own.c4, own.c128, own.taps)))


def _front(whole: Tensor, rows: int) -> Tensor:
    """[n, rows, C] from the beginning of whole [n, T, C]."""
    count, _, wide = whole.shape
    return whole.flatten()[: count * rows * wide].view(count, rows, wide)


class RecordedStep(Recorded):
    """The layers over the buffers, for one key."""

    def __init__(
        self, model: DeepseekV4, state: KVState, key: GraphKey, taps: tuple[int, ...], buffers: Buffers
    ) -> None:
        self.key, self._model, self._state, self._taps = key, model, state, taps
        self._packed = buffers.packed[: length(key, model.config)]
        self._columns = views(self._packed, key, model.config)
        self._streams, self.pending = buffers.streams(key.tokens), buffers.pending(key.tokens)
        self._rows: StepRows | None = None
        self._caches = [state.layer(layer) for layer in range(model.config.num_hidden_layers)]
        super().__init__(f"the graph {key.name}")

    def _now(self) -> tuple[int, ...]:
        """Where the memory lies that is another's."""
        caches = [self._state.pool(name) for name in self._state.specs]
        return tuple(part.data_ptr() for part in (self._packed, self._streams, self._state.relay, *caches))

    @torch.inference_mode()
    def record(self, pool: _POOL_HANDLE | None) -> None:
        """As Recorded.record, on a step without any request."""
        self._packed.copy_(Upload(self._model.device).tensor(blank(self.key, self._model.config)[0]))
        super().record(pool)

    @torch.inference_mode()
    def run(self, plan: GraphPlan) -> StepOutput:
        """The planned step; what it returns is valid until the next step of any key.

        raises  DeviceFailed where memory has moved that the step reads; ShapeMismatch for another key's plan
        """
        if plan.key != self.key or plan.batch.agreed_rows != self.key.tokens:
            raise ShapeMismatch(f"a plan for {plan.key} of {plan.batch.agreed_rows} rows, not {self.key}")
        self._check()
        self._packed.copy_(plan.packed)
        self._again()
        assert self._rows is not None
        rows = replace(self._rows, agreed_logits=plan.batch.agreed_logits)
        return StepOutput(wanted_logits(self._model, plan, self._streams, rows), self.pending)

    def _step(self) -> None:
        columns = self._columns
        relayed = self._state.relay.index_select(0, columns["row_slots"])
        token_ids = torch.where(columns["token_ids"] < 0, relayed, columns["token_ids"])
        rows = unfold(columns, self.key, self._state, self._model.ops)
        streams = self._model.backbone(token_ids, rows, self._caches, self.pending, self._taps)
        self._streams.copy_(streams)
        # The head needs sizes alone: keys that stayed with each size would be the most of a pool.
        self._rows = replace(rows, blocks=(), c4=None, c128=())


class Graphs:
    """The recorded steps of one rank, by key.

    taps     layers whose outputs every step captures
    tokens   ascending sizes that ranks agree on
    pool     of the device's graphs; None on the CPU
    draft    recorded passes of a draft, which end with these; None: there are none
    bytes    of the buffers, and on a device of the pool
    took_s   recording took
    """

    draft: RecordedDrafter | None = None

    def __init__(
        self,
        model: DeepseekV4,
        state: KVState,
        keys: Sequence[GraphKey],
        taps: tuple[int, ...],
        say: Callable[[str], None],
    ) -> None:
        begin, self._state = time.perf_counter(), state
        self.tokens = tuple(sorted({key.tokens for key in keys}))
        before = reserved(model.device)
        self._buffers = Buffers(model, keys, len(taps))
        self.pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._recorded: dict[GraphKey, RecordedStep] = {}
        # Largest first: what comes later fits the pool that is there.
        for number, key in enumerate(sorted(keys, reverse=True), 1):
            # Before it is captured: where one hangs or fails, the last line tells which.
            say(
                f"capturing {number} of {len(keys)} ({'decode' if key.width == 1 else 'verify'} "
                f"{key.tokens} rows, {key.slots} requests of up to {key.pages * PAGE_TOKENS} tokens)"
            )
            step = RecordedStep(model, state, key, taps, self._buffers)
            step.record(self.pool)
            self._recorded[key] = step
        held = sum(part.numel() * part.element_size() for part in self._buffers.parts)
        self.bytes = max(held, reserved(model.device) - before)
        self.took_s = time.perf_counter() - begin

    def key_for(self, batch: ForwardBatch) -> GraphKey | None:
        """The smallest recorded size that the batch fits; None where it fits none."""
        return min((key for key in self._recorded if key.fits(batch)), default=None)

    def plan(self, batch: ForwardBatch) -> GraphPlan | None:
        """The batch as a recorded step takes it; None where none fits. raises PageAccounting"""
        key = self.key_for(batch)
        return None if key is None else pack(self._state, batch, key)

    def run(self, plan: GraphPlan) -> StepOutput:
        """As RecordedStep.run."""
        return self._recorded[plan.key].run(plan)

    def close(self) -> None:
        """Frees all graphs, before the caches and the process groups that they name (I8)."""
        if self.draft is not None:
            self.draft.close()
        for step in self._recorded.values():
            step.free()
        self._recorded.clear()


def reserved(device: torch.device) -> int:
    """Bytes that the allocator holds; 0 on the CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
