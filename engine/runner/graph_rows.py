"""The plan of a decode or verify step in tensors of fixed shape: packed on the host, unfolded on the device.

All that a step is made of lies in one int64 buffer, so that a refresh is one copy, and no number of a former
step survives it. What can be told from it is computed on the device, inside what is captured: the host sends
a page number for 64 c4 or 2 c128 entries. Every row is a query block of its own, whatever request it is of.

Padded rows belong to no request: they see nothing, write the sink's row 1, and reach no expert. Padded
entries likewise: they are made of row 0's numbers, and written to row 1 of page 0, which nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.memory.pools import KVState
from engine.model.config import C4, C128, PAGE_TOKENS
from engine.model.ops import TorchOps
from engine.model.step import C4Entries, C128Entries, QueryBlocks, StepRows
from engine.runner.batch import ForwardBatch
from engine.runner.blocks import listed_entries, window_rows
from engine.runner.columns import Int, RowColumns, Upload, padded, unroll
from engine.runner.entries import plan_c4, plan_c128
from engine.runner.graph_layout import C128_COLUMNS, GraphKey, blank, places_of
from engine.runner.plan import PlannedStep, plan_commit, written_rows

HOST = Upload(torch.device("cpu"))


@dataclass(frozen=True)
class GraphPlan(PlannedStep):
    """A step that a captured graph runs.

    packed  int64 [n] on the device, laid out by `shapes`; token_ids and row_slots are views of it
    """

    key: GraphKey
    packed: Tensor


def pack(state: KVState, batch: ForwardBatch, key: GraphKey) -> GraphPlan:
    """The batch as a graph of this key takes it; host only, and independent of the graph's own memory.

    raises  PageAccounting as `plan_batch` does; ShapeMismatch where the batch doesn't fit the key
    """
    if not key.fits(batch):
        raise ShapeMismatch(
            f"{batch.slots.size} requests of up to {batch.counts.max(initial=0)} rows, up to position "
            f"{(batch.starts + batch.counts).max(initial=0)}, in {batch.load.padded_tokens} rows: the graph "
            f"is {key}"
        )
    columns = unroll(batch)
    packed, out = blank(key, state.config)
    out["token_ids"][: batch.tokens.size] = batch.tokens
    out["position"][:] = columns.position
    out["latent_rows"][:] = written_rows(state, batch, columns)
    out["row_slots"][:] = columns.row_slots
    out["request"][:] = columns.request
    own = (columns.request >= 0)[:, None]
    out["window"][:] = window_rows(state, columns.row_slots, columns.position[:, None], own)
    requests, reach = columns.slots.size, min(key.pages, state.full_table.shape[1])
    out["slots"][:requests] = columns.slots
    out["pages"][:requests, :reach] = state.full_table[columns.slots, :reach]
    _pack_entries(state, _padded(columns, key.slots), out)
    to, places = Upload(state.device), places_of(key, state.config.sliding_window)
    sent = to.tensor(packed)
    tokens, slots = places["token_ids"], places["row_slots"]
    return GraphPlan(
        batch=replace(batch, graph_key=key.name),
        token_ids=sent[tokens.first : tokens.end],
        row_slots=sent[slots.first : slots.end] if (batch.tokens < 0).any() else None,
        logit_rows=to.int64(batch.logit_rows),
        commit=plan_commit(columns, to),
        key=key,
        packed=sent,
    )


def _padded(columns: RowColumns, slots: int) -> RowColumns:
    """The columns with request columns of `slots` entries; added ones have no rows, in slot 0."""
    own = columns
    return replace(
        own, slots=padded(own.slots, slots), starts=padded(own.starts, slots),
        counts=padded(own.counts, slots), first_rows=padded(own.first_rows, slots),
    )  # fmt: skip


def _pack_entries(state: KVState, columns: RowColumns, out: dict[str, Int]) -> None:
    """Entries that close, behind each other from the first on."""
    c4 = plan_c4(state, columns, HOST)
    if c4 is not None:
        closing = len(c4.out_rows)
        out["c4_halves"][:closing] = c4.halves.numpy()
        out["c4_position"][:closing] = c4.positions.numpy()
        out["c4_out"][:closing] = c4.out_rows.numpy()
    for c128 in plan_c128(state, columns, True, HOST):
        for name in C128_COLUMNS:
            out[name][: len(c128.slots)] = getattr(c128, name.removeprefix("c128_")).numpy()


def unfold(columns: dict[str, Tensor], key: GraphKey, state: KVState, ops: TorchOps) -> StepRows:
    """What the layers need, on the device; no host read, shapes by the key alone.

    columns  of `views`
    ops      the kernel set that will run
    """
    position, request = columns["position"], columns["request"]
    padding = request < 0
    # Filled in place, here and below: nothing that is captured may bring a number from the host.
    ends = (position + 1).masked_fill_(padding, 0)
    pages = columns["pages"].index_select(0, request.clamp_min(0))
    window = _window(columns["window"], ends, ops.ranged)
    c4, c128 = (_entries(pages, ends, ratio, state, ops) for ratio in (C4, C128))
    chosen = c4[1].clamp_max(state.config.index_topk) if ops.ranged else None
    block = QueryBlocks(None, 1, *window, *c4, *c128, chosen)
    rows, held = len(position), {kind: bool(state.specs[kind].layers) for kind in ("c4", "c128")}
    return StepRows(
        position, columns["latent_rows"], position % C4, position % C128, (block,), None,
        _c4(columns) if held["c4"] else None, (_c128(columns, key.width),) if held["c128"] else (), padding,
        rows, rows,
    )  # fmt: skip


def _window(window: Tensor, ends: Tensor, ranged: bool) -> tuple[Tensor, Tensor]:
    """Window rows [T, K], and what each row sees of its own; ends [T] is past its position, 0 for padding."""
    if not ranged:
        return window, _bias(window != 0)
    count = ends.clamp_max(window.shape[1])
    return window.int(), torch.stack([window.shape[1] - count, count], dim=1).int()


def _bias(seen: Tensor) -> Tensor:
    """float32 [T, 1, K] of seen [T, K]."""
    bias = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
    return bias.masked_fill_(~seen, -torch.inf).unsqueeze(1)


def _entries(pages: Tensor, ends: Tensor, ratio: int, state: KVState, ops: TorchOps) -> tuple[Tensor, Tensor]:
    """Rows [T, N] of all entries that a row's request has room for, and which it sees; pages [T, M]."""
    a_page = PAGE_TOKENS // ratio if state.specs[f"c{ratio}"].layers else 0
    if ops.ranged:
        visible, entries = (ends // ratio).unsqueeze(1), pages.shape[1] * a_page
        return listed_entries(pages, visible, entries, ratio, state, ops)
    lane = torch.arange(a_page, device=pages.device)
    rows = (pages.unsqueeze(2) * a_page + lane).flatten(1)
    seen = torch.arange(rows.shape[1], device=pages.device) < (ends // ratio).unsqueeze(1)
    return rows.masked_fill_(~seen, 0), _bias(seen)


def _c4(columns: dict[str, Tensor]) -> C4Entries:
    position, item = columns["c4_position"], torch.arange(2 * C4, device=columns["slots"].device)
    ring = (columns["slots"].unsqueeze(1) * 2 * C4 + item).flatten()
    # The A-half of a request's first window is absent.
    seen = (position.unsqueeze(1) >= C4) | (item >= C4)
    bias = _bias(seen).transpose(1, 2)
    return C4Entries(ring, columns["c4_halves"], bias, position, columns["c4_out"])


def _c128(columns: dict[str, Tensor], width: int) -> C128Entries:
    own = {name.removeprefix("c128_"): columns[name] for name in C128_COLUMNS}
    return C128Entries(**{**own, "fresh": own["fresh"] != 0}, width=width)
