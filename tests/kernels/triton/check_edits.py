"""Edits of logits against the plain code: bit by bit, but for one fused rounding of penalties on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton import logits, masks
from engine.kernels.triton.accept_rows import spread
from engine.messages import Sampling
from engine.runner import edits
from engine.runner.edits import forbid
from tests.kernels.triton.cases import DEVICE, seeded
from tests.kernels.triton.sampling_cases import PADDING, Slots, normal_logits

PROMPT, TOKENS = 3, (3, 5, 3, 4, 4, 2)
"""What `Slots` binds."""
MIX = [
    Sampling(64),
    Sampling(64, logit_bias=((0, 1.5), (3, -2.0), (0, 0.25), (69, 1e-3))),
    Sampling(64, repetition_penalty=1.3),
    Sampling(64, frequency_penalty=0.7, presence_penalty=-0.4, logit_bias=((4, 3.0),)),
    Sampling(64, min_new_tokens=47, stop_token_ids=(2, 8)),
    Sampling(64, repetition_penalty=0.8, presence_penalty=0.5, min_new_tokens=200),
]


def tables(slots: Slots, vocab_size: int) -> masks.EditTables:
    """Of the slots' parameters; what nobody asked for is poisoned."""
    parameters, count = slots.parameters, len(slots.numbers) + 1

    def table(width: int, dtype: torch.dtype, poison: int) -> Tensor:
        return torch.full((count, width), poison, dtype=dtype, device=DEVICE)

    made = masks.EditTables(
        parameters.floats, table(vocab_size, torch.int32, 7), table(5, torch.int32, 0),
        table(5, torch.float32, 99), torch.zeros(count, dtype=torch.int32, device=DEVICE),
        table(4, torch.int32, 0), torch.zeros(count, dtype=torch.int32, device=DEVICE),
        torch.zeros(count, dtype=torch.int64, device=DEVICE),
    )  # fmt: skip
    for slot in slots.numbers:
        features = parameters.of(slot)
        if features.biased:
            ids, values = parameters.bias[slot]
            made.bias_ids[slot, : len(ids)], made.bias_values[slot, : len(ids)] = ids.int(), values
            made.bias_counts[slot] = len(ids)
        if features.stop_from:
            stops = parameters.stops[slot]
            made.stop_ids[slot, : len(stops)], made.stop_counts[slot] = stops.int(), len(stops)
            made.stop_from[slot] = features.stop_from
        tokens = np.asarray(TOKENS, np.int32).tobytes()
        made.seen[slot] = masks.seen_row(tokens, PROMPT, vocab_size).to(DEVICE)
    return made


def described(slots: Slots, lens: Sequence[int], rows: int) -> masks.VerifiedRows:
    columns = (torch.tensor(c, device=DEVICE) for c in (slots.numbers, slots.positions, lens))
    return spread(*columns, max(lens), rows)


@pytest.mark.parametrize("columns", [70, 2085])
def test_rows_are_edited_as_the_plain_code_edits_them(columns: int) -> None:
    slots, lens = Slots(columns, MIX), [2, 1, 3, 3, 2, 3]
    rows = normal_logits(columns, sum(lens), columns)
    ids = torch.tensor([[3, 5]] * 3 + [[4, 4], [1, 2], [9, -1]], device=DEVICE)
    words = torch.randint(
        -(2**31), 2**31 - 1, (2, -(-columns // 32)), generator=seeded(1), device=DEVICE, dtype=torch.int32
    )
    groups = edits.Groups(
        slots.numbers, slots.positions, lens, [slots.parameters.of(slot) for slot in slots.numbers]
    )
    constrained = torch.tensor([2, 13], device=DEVICE)
    wanted = edits.edit(
        slots.parameters, slots.counts, rows, groups, lambda z: forbid(z, constrained, words), ids
    )
    out = torch.cat([rows, rows[:1]])
    mask_rows = torch.full((len(out),), -1, device=DEVICE)
    mask_rows[constrained] = torch.arange(2, device=DEVICE)
    described_rows = described(slots, lens, len(out))
    stats = logits.new_stats(out)
    masks.edit(out, described_rows, tables(slots, columns), ids, masks.RowMasks(words, mask_rows), stats)
    assert torch.equal(out[-1], rows[0]), "padding stays as it is"
    assert torch.allclose(out[:-1], wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[:3], wanted[:3])
    assert not torch.equal(wanted, rows)
    right = logits.group_stats(out, described_rows.slots, slots.parameters.floats)
    assert torch.equal(stats.tops[:-1], right.tops[:-1])
    assert torch.equal(stats.args[:-1], right.args[:-1])
    assert torch.equal(stats.sums[:-1], right.sums[:-1])


def test_rows_that_stand_alone() -> None:
    slots = Slots(70, MIX)
    rows = normal_logits(0, len(MIX), 70)
    ones = [1] * len(MIX)
    groups = edits.Groups(
        slots.numbers, slots.positions, ones, [slots.parameters.of(slot) for slot in slots.numbers]
    )
    wanted = edits.edit(slots.parameters, slots.counts, rows, groups, None)
    masks.edit(rows, described(slots, ones, len(MIX)), tables(slots, 70))
    assert torch.allclose(rows, wanted, rtol=1e-6, atol=1e-6)
    assert bool((rows == float("-inf")).any())


def test_emitted_tokens_are_counted_where_penalties_want_them() -> None:
    slots = Slots(70, MIX)
    made = tables(slots, 70)
    before = made.seen.clone()
    tokens = torch.tensor([[4, 4, 6], [5, 5, 5], [1, 2, 3], [8, 8, 8]], device=DEVICE)
    columns = torch.tensor([[4, 1, 3, PADDING], [3, 3, 2, 3]], device=DEVICE)
    masks.count_tokens(made, columns[0], tokens, columns[1])
    before[4, 4] += 2
    before[4, 6] += 1
    before[3, 1] += 1
    before[3, 2] += 1
    assert torch.equal(made.seen, before)


def test_columns_must_agree() -> None:
    slots = Slots(70, MIX[:1])
    rows, made = torch.zeros(1, 70, device=DEVICE), tables(slots, 70)
    laid = described(slots, [1], 1)
    with pytest.raises(ShapeMismatch):
        masks.edit(rows, laid, made, masks=masks.RowMasks(torch.zeros(1, 2).int(), laid.groups))
    with pytest.raises(ShapeMismatch):
        masks.edit(rows[:, :60], laid, made)
    with pytest.raises(ShapeMismatch):
        masks.edit(rows, laid, made, stats=logits.new_stats(rows[:0]))
    with pytest.raises(ShapeMismatch):
        masks.count_tokens(made, laid.slots, torch.zeros(2, 1, dtype=torch.int64), laid.slots)
    masks.edit(rows[:0], described(slots, [0], 0), made)
