"""Plans by ranges let every query see the rows that plans by biases do, in any step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import PAGE_TOKENS
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import C4, C128, ModelConfig
from engine.model.groups import ALONE
from engine.model.keys import dense, keys_of
from engine.model.ops import TorchOps
from engine.model.step import C128Entries, QueryBlocks
from engine.runner.plan import Plan, plan_step
from tests.model.test_planning import FIELDS
from tests.runner.driver import int32

SLOTS, PAGES = 5, 40
KINDS = ("window", "c4", "c128")


class RangedOps(TorchOps):
    """Plain torch, planned for as kernels are."""

    ranged = True


def visible(block: QueryBlocks, kind: str) -> list[tuple[int, ...]]:
    """Pool rows that each query of a block sees, in order."""
    rows, seen = getattr(block, f"{kind}_rows"), getattr(block, f"{kind}_seen")
    keys = dense(keys_of(torch.empty(1 << 20, 0), rows, seen), len(rows), block.width)
    out = []
    for own, bias in zip(keys.rows, keys.bias, strict=True):
        out += [tuple(own[query == 0].tolist()) for query in bias]
    return out


def stepped(rng: np.random.Generator) -> tuple[KVState, RunStep]:
    """Requests of any lengths with pages anywhere, and a step of single rows, drafts and chunks of them."""
    state = KVState(ModelConfig.from_dict(FIELDS), SLOTS + 1, PAGES, PAGES, "cpu", torch.float32)
    starts, counts = rng.integers(0, 600, SLOTS), rng.choice([1, 1, 3, 8, 9, 130], SLOTS)
    free = rng.permutation(np.arange(1, PAGES)).tolist()
    for slot, end in enumerate(starts + counts, 1):
        state.bind(slot, 1)
        pages = [(slot, page, free.pop(), free[0]) for page in range(-(-int(end) // PAGE_TOKENS))]
        state.map_pages(np.array(pages, np.int32))
    return state, RunStep(
        1, "mixed", int32(range(1, SLOTS + 1)), int32([1] * SLOTS), int32(starts), int32(counts),
        int32([0] * int(counts.sum())), bytes([1] * SLOTS),
    )  # fmt: skip


def planned(state: KVState, step: RunStep, ops: TorchOps, single: bool) -> Plan:
    asked = SimpleNamespace(
        row_tile=16, single_rows=single, groups=ALONE, needs_every_rank=False, ops=ops
    )  # fmt: skip
    return plan_step(state, step, asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_ranges_let_through_what_biases_do(seed: int) -> None:
    state, step = stepped(np.random.default_rng(seed))
    ranged, plain = (planned(state, step, ops, seed % 2 > 0) for ops in (RangedOps(), TorchOps()))
    assert len(ranged.rows.blocks) == len(plain.rows.blocks)
    for own, other in zip(ranged.rows.blocks, plain.rows.blocks, strict=True):
        for kind in KINDS:
            assert visible(own, kind) == visible(other, kind)
        ends = [len(rows) for rows in visible(other, "c4")]
        assert own.c4_chosen is not None
        assert own.c4_chosen.tolist() == [[0, min(end, state.config.index_topk)] for end in ends]
    closing = [
        sorted(window for entries in plan.rows.c128 for window in columns(entries))
        for plan in (ranged, plain)
    ]
    assert closing[0] == closing[1]
    assert len(ranged.rows.c128) <= 1


def columns(entries: C128Entries) -> list[tuple[int | bool, ...]]:
    """One tuple a window that closes."""
    parts: list[Tensor] = [
        entries.slots, entries.fresh, entries.firsts, entries.counts, entries.out_rows, entries.positions,
    ]  # fmt: skip
    assert int(entries.counts.max()) <= entries.width
    return list(zip(*(part.tolist() for part in parts), strict=True))


def test_a_query_sees_its_window_and_what_closed_up_to_it() -> None:
    """By hand, of position 300 in pages 3 and 2 of windows, 4 and 6 of entries."""
    state = KVState(ModelConfig.from_dict(FIELDS), 2, 8, 8, "cpu", torch.float32)
    state.bind(1, 1)
    state.map_pages(np.array([[1, 0, 4, 3], [1, 1, 6, 2]], np.int32))
    step = RunStep(1, "decode", int32([1]), int32([1]), int32([300]), int32([1]), int32([0]), b"\1")
    block = planned(state, step, RangedOps(), True).rows.blocks[0]
    window = [3 * 256 + place for place in range(173, 256)] + [2 * 256 + place for place in range(45)]
    assert visible(block, "window")[0] == tuple(window)
    a_page = PAGE_TOKENS // C4
    entries = [4 * a_page + place for place in range(a_page)] + [6 * a_page + place for place in range(11)]
    assert visible(block, "c4")[0] == tuple(entries)
    assert visible(block, "c128")[0] == (4 * PAGE_TOKENS // C128, 4 * PAGE_TOKENS // C128 + 1)
    assert visible(block, "window")[1:] == [()] * 15
