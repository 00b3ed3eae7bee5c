"""The classic module gives what a float64 reference gives that reads the whole history for every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.memory.pools import KVState
from engine.model.draft import Drafted, InjectRows
from engine.model.tensor_specs import Draft
from tests.golden.driver import Driver
from tests.model.draft_case import FIELDS, OPS, Case
from tests.model.draft_reference import ClassicReference

CLASSIC: dict[str, Any] = {"fields": FIELDS, "draft": Draft.CLASSIC}


def check(case: Case, drafted: Drafted, slots: list[int], valid_from: list[int] | None = None) -> None:
    """Every row against the reference; tolerance 1e-5 of the largest logit."""
    assert drafted.logits is not None
    plain = ClassicReference(case.fields, case.weights)
    for row, slot in enumerate(slots):
        tokens, survival, logits = plain.draft(
            case.history[slot],
            case.next_tokens[slot].tolist(),
            valid_from[row] if valid_from else 0,
            case.drafter.block,
        )
        assert (drafted.logits[row] - logits).abs().max() < 1e-5 * max(1.0, float(logits.abs().max()))
        assert drafted.ids[row].tolist() == tokens
        assert (drafted.survival[row] - survival).abs().max() < 1e-5


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("block", [1, 4])
def test_every_length_equals_the_reference_alone_and_in_a_batch(ops: str, block: int) -> None:
    case = Case(**CLASSIC, ops=ops, block=block)
    lengths = (1, 5, 127, 128, 129, 133, 300)
    for slot, length in enumerate(lengths, 1):
        case.request(slot, length, seed=slot, pieces=(1, 7, 64, 128, 3))
    for slot in (1, 3, 5, 7):
        check(case, case.run([slot]), [slot])
    slots = list(range(len(lengths), 0, -1))
    check(case, case.run(slots), slots)


def test_rows_before_the_first_valid_one_are_not_looked_at() -> None:
    case = Case(**CLASSIC, block=3)
    for slot, (length, begin) in {1: (300, 290), 2: (129, 128), 3: (200, 73)}.items():
        case.request(slot, length, seed=slot, begin=begin)
    check(case, case.run([1, 2, 3], [290, 128, 73]), [1, 2, 3], [290, 128, 73])


def test_several_slots_enter_in_one_call_and_each_keeps_its_own_last_row() -> None:
    case = Case(**CLASSIC, block=3, ops="native")
    for slot in (4, 2, 7):
        case.request(slot, 20 + slot, seed=slot, begin=99)
    case.inject([(4, 0, 24), (2, 0, 22), (7, 0, 27)])
    check(case, case.run([7, 2, 4]), [7, 2, 4])


def test_rows_may_come_in_any_order() -> None:
    """The newest row's streams are kept, wherever it stands in the call."""
    case, other = Case(**CLASSIC, ops="native"), Case(**CLASSIC, ops="native")
    case.request(1, 40, seed=1)
    other.request(1, 40, seed=1, begin=40)
    mixed = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    rows = InjectRows(torch.ones_like(mixed), mixed, other.next_tokens[1][mixed])
    other.drafter.inject(other.state, rows, other.history[1][:, mixed])
    first, second = case.run([1]).logits, other.run([1]).logits
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_a_request_drafts_the_same_bits_alone_and_in_any_company() -> None:
    case = Case(**CLASSIC, block=3, ops="native")
    for slot, length in enumerate((300, 5, 128, 131, 64), 1):
        case.request(slot, length, seed=slot)
    together = case.run([5, 1, 3, 2, 4])
    for row, slot in enumerate((5, 1, 3, 2, 4)):
        alone = case.run([slot])
        for name in ("ids", "survival", "logits"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0])


@pytest.mark.parametrize("kind", [CLASSIC, {}], ids=["classic", "dspark"])
def test_no_confidence_depends_on_the_token_that_it_is_of(kind: dict[str, Any]) -> None:
    """It says how many drafts are verified: a cut must not know what it cuts, or anything behind it."""
    case = Case(**kind, block=4)
    case.request(1, 40, seed=1)
    likeliest = case.run([1])
    for place in range(4):
        other = case.run([1], choose=lambda k, z, at=place: z.argmin(1) if k == at else z.argmax(1))
        assert other.ids[0, place] != likeliest.ids[0, place]
        assert torch.equal(other.survival[0, : place + 1], likeliest.survival[0, : place + 1])


def test_rows_without_the_token_after_them_are_refused() -> None:
    case = Case(**CLASSIC)
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ShapeMismatch, match="without the token"):
        case.drafter.inject(case.state, InjectRows(one, one), torch.zeros(4, 1, 64))


def test_its_taps_are_the_streams_of_the_targets_last_layer() -> None:
    """Their collapse by the target's own head gives the target's own logits, bit for bit."""
    case = Case(**CLASSIC, ops="native")
    driver = Driver(case.model)
    assert isinstance(driver.state, KVState)
    driver.bind(1)
    (plan, out), _ = driver.forward([(1, list(range(2, 40)))], taps=case.drafter.taps)
    streams: Tensor = out.pending.taps.transpose(0, 1).contiguous()
    again = case.model.logits(streams, plan.rows.agreed_logits)
    assert torch.equal(again, out.logits)
    assert np.isfinite(again.numpy()).all()
