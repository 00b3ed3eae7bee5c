"""Closing and committing compressed entries against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.errors import PageAccounting, ShapeMismatch
from engine.kernels.triton import oracle_compress as oracle
from engine.kernels.triton.compress_c4 import close_c4
from engine.kernels.triton.compress_c128 import close_c128
from engine.kernels.triton.compress_commit import Committed, commit_c4, commit_c128
from engine.kernels.triton.compress_entry import latent_rows
from engine.kernels.triton.faults import Fault, check_faults, no_faults
from engine.model.latent_rows import pack_rows
from engine.model.row_layout import RowLayout
from engine.model.step import C4Entries, C128Entries
from tests.kernels.triton.cases import DEVICE, distance
from tests.kernels.triton.compress_cases import (
    KEY_WIDTH,
    POOL_ROWS,
    ROTATED,
    SLOTS,
    STEP_ROWS,
    c4_entries,
    drawn,
    index_pool,
    ints,
    latent_pool,
    turns_of,
)

EPS = 1e-6
TOLERANCE = {"float32": 1e-5, "plain": 3e-3, "rounded": 1e-2, "coded": 1e-2}
"""Float32 sums in another order; a rounding to bfloat16 that falls to the other side now and then; and an
FP8 or FP4 rounding that does, which is a sixteenth or a quarter of one value in hundreds."""


class C4:
    """A c4 layer whose ring, step and pools are random or empty."""

    def __init__(self, form: str, width: int, count: int) -> None:
        self.pool, self.keys, self.entries = latent_pool(form, width), index_pool(form), c4_entries(count)
        self.simulated = form == "rounded"
        self.given = tuple(drawn(rows, rows, 4 * (width + KEY_WIDTH)) for rows in (SLOTS * 8, STEP_ROWS))
        self.norms = (turns_of(3, count), drawn(4, width), drawn(5, KEY_WIDTH), EPS)
        self.faults = no_faults(DEVICE)

    def close(self, entries: C4Entries) -> None:
        close_c4(*self.given, entries, *self.norms, self.pool, self.keys, self.faults, self.simulated)

    def wanted(self) -> tuple[Tensor, Tensor]:
        return oracle.close_c4(*self.given, self.entries, *self.norms, self.pool, self.keys, self.simulated)

    def stored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return oracle.read_latents(self.pool, rows, ROTATED), oracle.read_keys(self.keys, rows)


@pytest.mark.parametrize(
    ("form", "width", "count"),
    [("float32", 100, 4), ("plain", 100, 3), ("rounded", 144, 4), ("coded", 144, 3), ("plain", 128, 0)],
)
def test_c4_entries_are_those_of_plain_torch(form: str, width: int, count: int) -> None:
    layer = C4(form, width, count)
    layer.close(layer.entries)
    for own, right in zip(layer.stored(layer.entries.out_rows), layer.wanted(), strict=True):
        assert distance(own, right) < TOLERANCE[form]
    others = ints(*(row for row in range(POOL_ROWS) if row not in layer.entries.out_rows.tolist()))
    assert not any(part.any() for part in layer.stored(others))
    assert int(layer.faults) == 0


def test_an_fp8_row_holds_the_bytes_that_packing_gives() -> None:
    layer, layout = C4("coded", 144, 2), RowLayout(128, ROTATED)
    layer.close(layer.entries)
    plain = latent_pool("plain", 144)
    latents = oracle.close_c4(*layer.given, layer.entries, *layer.norms, plain, layer.keys, False)[0]
    own, right = layer.pool[layer.entries.out_rows], pack_rows(latents.bfloat16(), layout)
    assert torch.equal(own[:, layout.scales_at :], right[:, layout.scales_at :])
    assert float((own != right).float().mean()) < TOLERANCE["coded"]


def test_an_absent_half_window_weighs_nothing() -> None:
    layer = C4("float32", 100, 1)
    layer.given[1].fill_(7.0)
    layer.entries.halves[0] = ints(0, 1, 2, 3, *range(32, 36))
    layer.close(layer.entries)
    kept = layer.stored(layer.entries.out_rows)
    layer.given[0].fill_(-3.0)
    layer.close(layer.entries)
    assert all(map(torch.equal, layer.stored(layer.entries.out_rows), kept))


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("halves", 2 * (16 + STEP_ROWS), Fault.HALF), ("halves", -1, Fault.HALF),
        ("ring_rows", SLOTS * 8, Fault.RING_ROW), ("ring_rows", -1, Fault.RING_ROW),
        ("out_rows", POOL_ROWS, Fault.OUT_ROW), ("out_rows", -2, Fault.OUT_ROW),
        ("out_rows", -1, Fault(0)), ("out_rows", 0, Fault(0)),
    ],
)  # fmt: skip
def test_a_c4_index_outside_is_told_and_writes_nothing(column: str, value: int, fault: Fault) -> None:
    layer = C4("plain", 64, 1)
    layer.entries.halves[0, 2] = 0
    getattr(layer.entries, column).view(-1)[2 if column == "halves" else 0] = value
    layer.close(layer.entries)
    assert not any(part.any() for part in layer.stored(ints(*range(POOL_ROWS))))
    assert int(layer.faults) == fault


def test_faults_name_what_pointed_outside() -> None:
    check_faults(0)
    with pytest.raises(PageAccounting, match=r"RING_ROW.*SLOT"):
        check_faults(int(Fault.SLOT | Fault.RING_ROW))


class C128:
    """A c128 layer of 64 + 16 channels with random states, and a step of 200 rows."""

    def __init__(self, form: str, slots: list[int], firsts: list[int], counts: list[int]) -> None:
        self.pool, self.states = latent_pool(form, 80), drawn(1, SLOTS, 3, 80)
        self.states[:, 1].abs_()
        fresh, out_rows = ints(*counts) == 128, ints(*range(3, 3 + len(slots)))
        self.entries = C128Entries(
            ints(*slots), fresh, ints(*firsts), ints(*counts), out_rows, 128 * out_rows, 128
        )
        self.rest, self.simulated = (turns_of(3, len(slots)), drawn(4, 80), EPS, self.pool), form == "rounded"
        self.pending, self.faults = drawn(2, 200, 160) * 3, no_faults(DEVICE)

    def close(self, entries: C128Entries) -> Tensor:
        close_c128(self.states, self.pending, entries, *self.rest, self.faults, self.simulated)
        return oracle.read_latents(self.pool, entries.out_rows.clamp(0, POOL_ROWS - 1), ROTATED)


def test_a_step_may_close_no_window() -> None:
    layer = C128("plain", [], [], [])
    assert not layer.close(layer.entries).numel()


@pytest.mark.parametrize("form", ["float32", "plain", "rounded", "coded"])
def test_c128_entries_are_those_of_plain_torch(form: str) -> None:
    layer = C128(form, [3, 0, 2], [5, 133, 199], [128, 17, 1])
    states, entries = layer.states.clone(), layer.entries
    own = layer.close(entries)
    columns = (entries.slots, entries.fresh, entries.firsts, entries.counts)
    right = oracle.close_c128(states, layer.pending, *columns, *layer.rest, layer.simulated)
    assert distance(own, right) < TOLERANCE[form]
    assert torch.equal(layer.states, states)
    assert int(layer.faults) == 0


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("slots", SLOTS, Fault.SLOT), ("slots", -1, Fault.SLOT), ("firsts", 73, Fault.STEP_ROW),
        ("firsts", -1, Fault.STEP_ROW), ("counts", 129, Fault.LENGTH), ("counts", 0, Fault.LENGTH),
        ("out_rows", POOL_ROWS, Fault.OUT_ROW), ("out_rows", -2, Fault.OUT_ROW),
        ("out_rows", -1, Fault(0)), ("out_rows", 0, Fault(0)),
    ],
)  # fmt: skip
def test_a_c128_index_outside_is_told_and_writes_nothing(column: str, value: int, fault: Fault) -> None:
    layer = C128("plain", [1], [2], [128])
    layer.close(replace(layer.entries, **{column: ints(value)}))
    assert not layer.pool.any()
    assert int(layer.faults) == fault


STEPS = {
    "decode rows": ([1, 0, 2, 3], [5, 127, 128, 255], [1, 1, 1, 1], [1, 1, 1, 0]),
    "drafts, some taken": ([2, 3, 1], [126, 250, 0], [6, 6, 6], [0, 6, 3]),
    "a chunk and padding": ([2, -1, 1], [70, 9, 0], [150, 3, 40], [150, 3, 38]),
    "nothing": ([], [], [], []),
}


def step_of(name: str) -> Committed:
    slots, starts, counts, lens = (ints(*column) for column in STEPS[name])
    return Committed(slots, starts, counts.cumsum(0) - counts, counts, lens)


def layers_of_states() -> Tensor:
    return drawn(1, 2, SLOTS, 3, 72).abs()


@pytest.mark.parametrize("name", STEPS)
def test_committed_rows_are_folded_as_if_one_by_one(name: str) -> None:
    step, faults = step_of(name), no_faults(DEVICE)
    real = step.slots >= 0
    rows = [column[real] for column in (step.slots, step.starts, step.firsts, step.lens)]
    states, pending = layers_of_states(), drawn(2, 2, 193, 144)
    right = oracle.commit_c128(states, pending, *rows)
    commit_c128(states, pending, step, faults)
    # Maxima apart: that of an empty state would outweigh all else.
    assert torch.equal(states[:, :, 0], right[:, :, 0])
    assert distance(states[:, :, 1:], right[:, :, 1:]) < TOLERANCE["float32"]
    ring, pending = drawn(3, 2, SLOTS * 8, 40), drawn(4, 2, 193, 40)
    right = oracle.commit_c4(ring, pending, *rows)
    commit_c4(ring, pending, step, faults)
    assert torch.equal(ring, right)
    assert int(faults) == 0


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("slots", SLOTS, Fault.SLOT), ("slots", -2, Fault.SLOT), ("firsts", -1, Fault.STEP_ROW),
        ("firsts", 6, Fault.STEP_ROW), ("lens", -1, Fault.LENGTH), ("lens", 5, Fault.LENGTH),
        ("starts", -1, Fault.LENGTH),
    ],
)  # fmt: skip
def test_a_commit_outside_is_told_and_changes_nothing(column: str, value: int, fault: Fault) -> None:
    step = replace(Committed(ints(1), ints(3), ints(2), ints(4), ints(4)), **{column: ints(value)})
    for kernel, state, width in (
        (commit_c128, layers_of_states(), 144), (commit_c4, drawn(3, 2, SLOTS * 8, 40), 40),
    ):  # fmt: skip
        kept, faults = state.clone(), no_faults(DEVICE)
        kernel(state, drawn(2, 2, 9, width), step, faults)
        assert torch.equal(state, kept)
        assert int(faults) == fault


def test_shapes_are_checked() -> None:
    layer = C4("plain", 64, 1)
    with pytest.raises(ShapeMismatch):
        layer.close(replace(layer.entries, halves=ints(0)))
    with pytest.raises(ShapeMismatch, match="rows of 65"):
        latent_rows(latent_pool("plain", 64), 65, 49, False)
    with pytest.raises(ShapeMismatch, match="multiples of 64"):
        latent_rows(latent_pool("plain", 64), 64, 48, True)
    with pytest.raises(ShapeMismatch):
        commit_c4(drawn(3, 1, 8, 40), drawn(4, 2, 9, 40), step_of("nothing"), layer.faults)
