"""Folding a step's pending rows into the committed state of its requests."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.memory.pools import KVState
from engine.model.compressor import started
from engine.model.config import C4, C128
from engine.model.ops import TorchOps
from engine.model.step import CommitGroup, CommitRows, Pending


def commit(state: KVState, rows: CommitRows, pending: Pending, lens: Tensor, ops: TorchOps) -> None:
    """Commits the first `lens` rows of each request; what came after them is as if it had never run.

    lens  int64 [B] on the state's device, 0 <= lens[i] <= the request's rows; no host read
    """
    if not rows.most:
        return
    if pending.c4.shape[0]:
        _commit_ring(state, rows, pending.c4, lens)
    if pending.c128.shape[0]:
        for group in rows.groups:
            _commit_c128(state, rows, group, pending.c128, lens, ops)
    state.lengths.index_copy_(0, rows.slots, rows.starts + lens)


def _commit_ring(state: KVState, rows: CommitRows, raw: Tensor, lens: Tensor) -> None:
    """Writes the last (at most eight) committed raw rows of each request at their position mod 8."""
    ring = 2 * C4
    kept = min(rows.most, ring)
    step = lens.unsqueeze(1) - kept + torch.arange(kept, device=lens.device)
    place = rows.slots.unsqueeze(1) * ring + (rows.starts.unsqueeze(1) + step) % ring
    place = torch.where(step >= 0, place, 0).flatten()
    source = (rows.first_rows.unsqueeze(1) + step.clamp_min(0)).flatten()
    state.pool("c4_ring").index_copy_(1, place, raw.index_select(1, source))


def _commit_c128(
    state: KVState, rows: CommitRows, group: CommitGroup, raw: Tensor, lens: Tensor, ops: TorchOps
) -> None:
    """Folds the committed rows of each request's open window into its online state."""
    slots, starts, first, length = (
        column.index_select(0, group.requests) for column in (rows.slots, rows.starts, rows.first_rows, lens)
    )
    window = (starts + length) // C128 * C128
    begin = (window - starts).clamp_min(0).unsqueeze(1)
    step = begin + torch.arange(group.width, device=lens.device)
    valid = step < length.unsqueeze(1)
    layers, requests = raw.shape[0], slots.shape[0]
    source = torch.where(valid, first.unsqueeze(1) + step, 0).flatten()
    items = raw.index_select(1, source).view(layers * requests, group.width, -1)
    pool = state.pool("c128_state").view(layers, state.slots, 3, -1)
    old = started(pool.index_select(1, slots).flatten(0, 1), (window >= starts).repeat(layers))
    new = ops.fold(old, items, valid.repeat(layers, 1))
    pool.index_copy_(1, slots, new.view(layers, requests, 3, -1))
