"""Verification of drafts against the plain code: the same tokens, counts and validity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton import accept
from engine.kernels.triton.accept_rows import spread
from engine.messages import Sampling
from engine.runner.acceptance import Acceptance, Accepted
from engine.runner.acceptance_layout import VerifyRows
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.sampling_cases import PADDING, Slots, normal_logits

GAMMA = 3
MIX = [
    Sampling(64, temperature=0.0),
    Sampling(64, seed=2),
    Sampling(64, seed=3, temperature=1.5),
    Sampling(64, seed=4, top_k=5),
    Sampling(64, seed=5, top_p=0.8, temperature=0.7),
    Sampling(64, seed=6, seeded=True),
    Sampling(64, seed=7, min_p=0.1),
    Sampling(64, seed=8, top_k=20, seeded=True),
]


def drafted(seed: int, lens: list[int], columns: int, sharp: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [M, V], draft ids [B, GAMMA] and draft logits [B, GAMMA, V], near each other."""
    rows = normal_logits(seed, sum(lens), columns, 1.5)
    near = normal_logits(seed + 1, len(lens) * GAMMA, columns, sharp).view(len(lens), GAMMA, columns)
    first = 0
    for group, own in enumerate(lens):
        near[group, : max(own - 1, 0)] += rows[first : first + max(own - 1, 0)]
        first += own
    ids = (near + normal_logits(seed + 2, 1, near.numel(), 0.8).view(near.shape)).argmax(2)
    return rows, ids, near


def by_kernel(
    slots: Slots, lens: list[int], rows: Tensor, ids: Tensor, near: Tensor | None, padded: int = 0
) -> accept.Verdicts:
    """With `padded` groups and as many rows that are nobody's behind the real ones."""
    columns = (
        [*slots.numbers, *[PADDING] * padded],
        [*slots.positions, *[0] * padded],
        [*lens, *[2] * padded],
    )
    numbers, positions, lengths = (torch.tensor(c, dtype=torch.int64, device=DEVICE) for c in columns)
    if padded:
        rows = torch.cat([rows, torch.zeros(padded, rows.shape[1], device=DEVICE)])
        ids = torch.cat([ids, ids[:1].expand(padded, -1)])
        near = None if near is None else torch.cat([near, near[:1].expand(padded, -1, -1)])
    parameters = slots.parameters
    repeats = torch.tensor([f is not None and f.repeats for f in parameters.features], device=DEVICE)
    # Statistics may have been made with the drafts; without them they are made here.
    stats = None if near is None or padded else accept.draft_stats(near, numbers, parameters.floats)
    drafts = accept.Drafts(numbers, positions, lengths, ids, near, stats)
    return accept.accept(rows, drafts, parameters.floats, parameters.ints, repeats.to(torch.uint8))


def plain(slots: Slots, lens: list[int], rows: Tensor, ids: Tensor, near: Tensor | None) -> Accepted:
    verify = VerifyRows(slots.numbers, slots.positions, np.array(lens, np.int64), ids, near)
    return Acceptance(slots.parameters, slots.counts).accept(rows, verify)


def assert_equal(out: accept.Verdicts, wanted: Accepted) -> None:
    groups = len(wanted.counts)
    assert out.counts[:groups].tolist() == wanted.counts.tolist()
    assert out.tokens[:groups].tolist() == wanted.tokens.tolist()
    assert out.valid[:groups].tolist() == wanted.valid.tolist()
    assert not out.counts[groups:].any()
    assert not out.tokens[groups:].any()


@pytest.mark.parametrize(
    ("dense", "padded", "lens"), [(True, 1, [4, 3, 4, 0, 4, 2, 4, 1]), (False, 2, [1, 4, 2, 4, 4, 4, 3, 4])]
)
def test_groups_emit_what_the_plain_code_emits(dense: bool, padded: int, lens: list[int]) -> None:
    slots = Slots(150, MIX)
    rows, ids, near = drafted(padded, lens, 150)
    ids[1, 1], ids[4, 0] = -1, 150
    kept = near if dense else None
    wanted = plain(slots, lens, rows, ids, kept)
    assert_equal(by_kernel(slots, lens, rows, ids, kept, padded), wanted)
    ends = {own - count for own, count in zip(lens, wanted.counts.tolist(), strict=True) if own > 1}
    assert len(ends) > 2, "some are cut off early, some are accepted whole"


def test_a_group_of_no_rows_and_no_group_at_all() -> None:
    slots = Slots(70, MIX[:2])
    rows, ids, near = drafted(3, [0, 0], 70)
    assert_equal(by_kernel(slots, [0, 0], rows, ids, near, padded=1), plain(slots, [0, 0], rows, ids, near))
    none = by_kernel(Slots(70, []), [], rows, ids[:0], near[:0])
    assert none.tokens.shape == (0, GAMMA + 1)


def test_unfit_rows_fail_their_group_alone() -> None:
    mix, lens = [MIX[1], MIX[0], MIX[3], MIX[1], MIX[4]], [4, 4, 4, 4, 4]
    slots = Slots(90, mix)
    rows, ids, near = drafted(5, lens, 90)
    ids[2] = rows[8:11].argmax(1)
    rows[1], rows[6, 3], rows[11], rows[12, 5] = float("-inf"), float("nan"), float("-inf"), float("inf")
    wanted = plain(slots, lens, rows, ids, near)
    # The order that drafts are made in, position by position.
    ids, near = ids.t().contiguous().t(), near.transpose(0, 1).contiguous().transpose(0, 1)
    assert_equal(by_kernel(slots, lens, rows, ids, near), wanted)
    assert not wanted.valid.all()


def test_a_rejection_without_residual_draws_from_p() -> None:
    """q equals p and the draft is one that p cut away: nothing of p is above q beyond rounding."""
    slots, lens = Slots(40, [Sampling(64, seed=i, top_k=39) for i in range(2)]), [2, 2]
    rows, ids, _ = drafted(7, lens, 40)
    near = torch.zeros(2, GAMMA, 40, device=DEVICE)
    near[:, 0] = rows[::2]
    ids[:, 0] = rows[::2].argmin(1)
    assert_equal(by_kernel(slots, lens, rows, ids, near), plain(slots, lens, rows, ids, near))
    flat = torch.full((4, 40), float("-inf"), device=DEVICE)
    flat[:, 7] = 0
    ids[:] = 7
    assert_equal(by_kernel(slots, lens, flat, ids, None), plain(slots, lens, flat, ids, None))


def test_rows_are_spread_over_groups() -> None:
    columns = (torch.tensor(c, device=DEVICE) for c in ([5, 2, PADDING, 7], [10, 20, 30, 40], [2, 0, 3, 1]))
    out = spread(*columns, 4, 5)
    assert out.slots.tolist() == [5, 5, 7, -1, -1]
    assert out.positions.tolist() == [10, 11, 40, 0, 0]
    assert out.groups.tolist() == [0, 0, 3, -1, -1]
    assert out.ahead.tolist() == [0, 1, 0, 0, 0]


def test_shapes_must_agree() -> None:
    slots = Slots(70, MIX[:1])
    rows, ids, near = drafted(3, [4], 70)
    with pytest.raises(ShapeMismatch):
        by_kernel(slots, [4], rows, ids, near[:, :, :60])
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ShapeMismatch):
        spread(one, one.expand(2), one, 4, 4)
