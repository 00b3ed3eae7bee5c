"""Drafts in bfloat16, and the memory that they take."""

from __future__ import annotations

import pytest
import torch

from engine.model.tensor_specs import Draft
from tests.model.draft_case import DSPARK, FIELDS, Case


@pytest.mark.parametrize("draft", [Draft.CLASSIC, Draft.DSPARK])
def test_bfloat16_stays_near_float32(draft: Draft) -> None:
    """Within 5% of the largest logit, with the same tokens chosen: weights, taps and KV are rounded."""
    fields = FIELDS if draft is Draft.CLASSIC else FIELDS | DSPARK
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(fields=fields, draft=draft, block=4, dtype=dtype)
        case.request(1, 140, seed=1, pieces=(128, 5))
        drafted = case.run([1], choose=lambda k, z: torch.tensor([k + 7]))
        assert drafted.logits is not None
        found.append(drafted)
    exact, near = found
    assert (exact.logits - near.logits).abs().max() < 0.05 * exact.logits.abs().max()
    assert (exact.survival - near.survival).abs().max() < 0.05
    assert near.logits.dtype == near.survival.dtype == torch.float32


def test_a_state_knows_its_bytes() -> None:
    """Ring and block of every stage and slot; a classic module keeps one row's streams beside them."""
    assert Case(slots=3).state.bytes == 4 * 3 * 3 * (128 + 5) * 64
    classic = Case(fields=FIELDS, draft=Draft.CLASSIC, block=2, slots=3)
    assert classic.state.bytes == 4 * 3 * ((128 + 2) * 64 + 4 * 64)
