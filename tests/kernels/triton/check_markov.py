"""The Markov head's loop against the plain head and the plain choice, position by position."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ShapeMismatch
from engine.kernels.triton import markov
from engine.kernels.triton.logits import group_stats
from engine.messages import Sampling
from engine.model.markov import MarkovHead, MarkovWeights
from engine.model.ops import TorchOps
from engine.runner.acceptance import Acceptance
from tests.kernels.triton.cases import DEVICE, distance, seeded
from tests.kernels.triton.sampling_cases import PADDING, Slots, normal_logits

MIX = [
    Sampling(64, temperature=0.0),
    Sampling(64, seed=2),
    Sampling(64, seed=3, temperature=0.6, top_k=4),
    Sampling(64, seed=4, top_k=1),
    Sampling(64, seed=5, top_k=3, seeded=True),
    Sampling(64, seed=6, seeded=True),
]


def weights(columns: int, rank: int, dtype: torch.dtype) -> MarkovWeights:
    w1, w2 = (
        (torch.randn(columns, rank, generator=seeded(seed), device=DEVICE) * rank**-0.25).to(dtype)
        for seed in (1, 2)
    )
    return MarkovWeights("vanilla", w1, w2, None, None)


def choosers(slots: Slots, padding: int, repeats: bool) -> markov.Choosers:
    parameters = slots.parameters
    again = torch.tensor([f is not None and f.repeats for f in parameters.features], device=DEVICE)
    return markov.Choosers(
        torch.tensor([*slots.numbers, *[PADDING] * padding], dtype=torch.int64, device=DEVICE),
        torch.tensor([*slots.positions, *[0] * padding], dtype=torch.int64, device=DEVICE),
        parameters.floats, parameters.ints, again.to(torch.uint8) if repeats else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("gamma", "repeats"), [(3, True), (2, False)])
def test_a_block_is_drafted_as_by_the_plain_head(dtype: torch.dtype, gamma: int, repeats: bool) -> None:
    columns, mix = 290, MIX if repeats else MIX[:4]
    slots, own = Slots(columns, mix), weights(columns, 72, dtype)
    head = MarkovHead(TorchOps(), MarkovWeights("vanilla", own.w1.float(), own.w2.float(), None, None))
    rows = normal_logits(0, gamma * (len(mix) + 1), columns).view(gamma, len(mix) + 1, columns)
    anchors = torch.arange(len(mix) + 1, device=DEVICE) * 7
    pick, previous = (
        Acceptance(slots.parameters, slots.counts).choose(slots.numbers, slots.positions),
        anchors,
    )
    out_rows = rows.clone()
    out = markov.draft_block(out_rows, anchors, own.w1, own.w2, choosers(slots, 1, repeats))
    for k in range(gamma):
        bias, _ = head.bias(head.embed(previous[: len(mix)]), torch.empty(0), torch.empty(0))
        z = rows[k, : len(mix)] + bias
        assert distance(out_rows[k, : len(mix)], z) < 1e-6
        previous = pick(k, z)
        assert out.ids[: len(mix), k].tolist() == previous.tolist()
    wanted = group_stats(out_rows.flatten(0, 1))
    assert torch.equal(out.stats.tops, wanted.tops)
    assert torch.equal(out.stats.args, wanted.args)
    warm = group_stats(out_rows[0, 1:2], torch.tensor([2], device=DEVICE), slots.parameters.floats)
    assert torch.allclose(out.stats.sums[1], warm.sums[0])


def test_e_may_be_given() -> None:
    """What the gated and the recurrent head make of W1's row."""
    own, e = weights(140, 16, torch.float32), torch.randn(2, 16, generator=seeded(9), device=DEVICE)
    rows, slots = normal_logits(1, 2, 140), Slots(140, MIX[:2])
    stats, given = group_stats(rows), choosers(slots, 0, False)
    out = rows.clone()
    markov.add_bias(out, e, own.w2, None, stats, given.slots, given.floats)
    assert distance(out, rows + e @ own.w2.t()) < 1e-6


def test_no_row_and_shapes_that_disagree() -> None:
    own, given = weights(70, 8, torch.bfloat16), choosers(Slots(70, []), 0, False)
    none = torch.empty(2, 0, 70, device=DEVICE)
    out = markov.draft_block(none, given.slots, own.w1, own.w2, given)
    assert out.ids.shape == (0, 2)
    with pytest.raises(ShapeMismatch):
        markov.draft_block(torch.zeros(1, 0, 60, device=DEVICE), given.slots, own.w1, own.w2, given)
    with pytest.raises(ShapeMismatch):
        markov.draft_block(none, given.slots, own.w1, own.w2.t().contiguous().t(), given)
