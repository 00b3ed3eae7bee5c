"""Recorded passes of DSpark's stages give the drafts of eager ones, whatever the size was padded from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.errors import DeviceFailed
from engine.model.draft import Drafted
from engine.model.draft_dspark import DSparkDrafter
from engine.runner.draft_graphs import RecordedDrafter
from tests.model.draft_case import OPS, Case

LENGTHS = (1, 5, 127, 128, 300)


def case_of(ops: str) -> Case:
    """Requests of LENGTHS in slots 1 to 5."""
    case = Case(ops=ops)
    for slot, length in enumerate(LENGTHS, 1):
        case.request(slot, length, seed=slot)
    return case


def recorded(case: Case, sizes: tuple[int, ...]) -> tuple[RecordedDrafter, list[str]]:
    """The case drafts by recorded passes from now on; and what was said."""
    said: list[str] = []
    assert isinstance(case.drafter, DSparkDrafter)
    case.drafter = made = RecordedDrafter(case.drafter, case.state, sizes, None, said.append)
    return made, said


def same(one: Drafted, other: Drafted) -> bool:
    """Bit for bit."""
    assert one.logits is not None
    assert other.logits is not None
    pairs = ((one.ids, other.ids), (one.survival, other.survival), (one.logits, other.logits))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("ops", [ops for ops in OPS if ops != "torch"])
@pytest.mark.parametrize("slots", [[2], [5, 1], [4, 2, 3], [1, 2, 3, 4, 5]])
def test_drafts_are_those_of_eager_passes(ops: str, slots: Sequence[int]) -> None:
    """Kernels that keep rows independent: a padded size must give the same bits."""
    case = case_of(ops)
    eager = case.run(slots)
    recorded(case, (1, 2, 4))
    assert same(case.run(slots), eager)
    # Whatever was drafted between leaves nothing behind.
    case.run([3])
    assert same(case.run(slots), eager)


def test_more_requests_than_any_size_pass_eagerly() -> None:
    case = case_of("native")
    made, said = recorded(case, (2, 1))
    assert said == ["capturing 1 of 2 (draft of 2 requests)", "capturing 2 of 2 (draft of 1 requests)"]
    for one in made._recorded.values():
        one.anchors.fill_(-1)
    case.run([1, 2, 3])
    assert all(bool((one.anchors == -1).all()) for one in made._recorded.values())


def test_no_request_and_another_state_pass_eagerly() -> None:
    case = case_of("native")
    made, _ = recorded(case, (2,))
    assert case.run([]).ids.shape == (0, made.block)
    wanted = case.run([3])
    case.state = made.new_state(case.slots)
    case.request(3, LENGTHS[2], seed=3)
    assert same(case.run([3]), wanted)


def test_a_state_that_has_moved_is_an_error_until_the_passes_are_closed() -> None:
    case = case_of("native")
    made, _ = recorded(case, (2,))
    wanted = case.run([1, 2])
    case.state.pool.data = case.state.pool.clone()
    with pytest.raises(DeviceFailed, match="memory that has moved"):
        case.run([1, 2])
    made.close()
    assert same(case.run([1, 2]), wanted)


def test_padding_reads_and_writes_the_sink_alone() -> None:
    case = case_of("native")
    recorded(case, (4,))
    before = case.state.pool.clone()
    case.run([2])
    stride, ring = case.state.stride, np.arange(case.state.pool.shape[1])
    touched = (case.state.pool.nan_to_num() != before.nan_to_num()).any(-1).any(0).numpy()
    assert set((ring[touched] // stride).tolist()) <= {0, 2}
