"""Folding a step's pending rows into the committed state of its requests."""

from __future__ import annotations

from torch import Tensor

from engine.memory.pools import KVState
from engine.model.ops import TorchOps
from engine.model.step import CommitRows, Pending


def commit(state: KVState, rows: CommitRows, pending: Pending, lens: Tensor, ops: TorchOps) -> None:
    """Commits the first `lens` rows of each request; what came after them is as if it had never run.

    lens  int64 [B] on the state's device, 0 <= lens[i] <= the request's rows; no host read
    """
    if not rows.most:
        return
    if pending.c4.shape[0]:
        ops.commit_c4(state.pool("c4_ring"), pending.c4, rows, lens)
    if pending.c128.shape[0]:
        states = state.pool("c128_state").view(len(pending.c128), state.slots, 3, -1)
        ops.commit_c128(states, pending.c128, rows, lens)
    state.lengths.index_copy_(0, rows.slots, rows.starts + lens)
