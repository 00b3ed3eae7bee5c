"""Rows that go by memory of the devices, between processes, and what a missing rank does."""

from __future__ import annotations

import pytest
import torch

from engine.errors import CollectiveFailed, PageAccounting, ShapeMismatch
from engine.kernels.near_planes import LINE, bytes_for, planes, rows_within
from engine.kernels.triton import near, routing
from engine.kernels.triton.arrivals import Arrival
from engine.kernels.triton.faults import Fault, check_faults, no_faults
from engine.kernels.triton.near import Reach
from tests.kernels.triton import near_ranks
from tests.kernels.triton.cases import DEVICE, values


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two devices")
def test_ranks_get_the_bits_that_collectives_give() -> None:
    assert near_ranks.compare() == ["the same"] * near_ranks.RANKS


def test_a_region_has_room_for_the_rows_it_is_said_to_have() -> None:
    for size in (10, 4096, 123_456, 1 << 20):
        for sizes in ((2, 256, 2), (2, 4096, 6), (5, 128, 3)):
            rows = rows_within(size, sizes[0], *sizes[1:])
            assert rows == 0 or planes(sizes[0], rows, *sizes[1:]).bytes <= size
            assert planes(sizes[0], rows + 2 + sizes[0], *sizes[1:]).bytes > size - 8 * LINE
            assert rows_within(bytes_for(sizes[0], rows + 1, *sizes[1:]), sizes[0], *sizes[1:]) > rows


def alone(patience_ns: int) -> tuple[Reach, torch.Tensor]:
    """The first of two ranks, whose regions are both here; and the other one's region."""
    cut = planes(2, 4, 128, 2)
    own, other = (torch.zeros(cut.bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    bases = torch.tensor([own.data_ptr(), other.data_ptr()], device=DEVICE)
    turns = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    return Reach(0, cut, own, bases, turns, no_faults(DEVICE), patience_ns), other


def test_a_rank_that_never_writes_is_a_failure_that_is_told() -> None:
    reach, other = alone(20_000)
    ids = torch.tensor([[0, 1]], device=DEVICE, dtype=torch.int32)
    pushed = near.push(reach, values(0, 1, 128), ids, torch.rand(1, 2, device=DEVICE), 1)
    assert other.view(torch.int64)[0] == reach.own.view(torch.int64)[0] == 1
    routing.sort_choices(pushed.ids, 1, 16, 0, pushed.arrival)
    with pytest.raises(CollectiveFailed, match="another rank"):
        check_faults(int(reach.faults))


def test_who_waited_in_vain_waits_no_more_and_tells_nothing() -> None:
    reach, other = alone(10**15)
    reach.faults.fill_(int(Fault.PEER))
    flags = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    ids = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    routing.sort_choices(ids, 1, 16, 0, Arrival(flags, reach.turns, reach.faults, reach.patience_ns))
    near.push(reach, values(0, 1, 128), ids, torch.rand(1, 2, device=DEVICE), 1)
    near.join_home(reach, ids, values(1, 1, 128))
    assert not other.view(torch.int64)[0]
    assert not reach.plane(reach.planes.through, torch.int64, 1)


def test_an_index_outside_is_told_as_what_it_is_and_ends_no_waiting() -> None:
    reach, _ = alone(20_000)
    reach.faults.fill_(int(Fault.KEY_ROW))
    ids = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    pushed = near.push(reach, values(0, 1, 128), ids, torch.rand(1, 2, device=DEVICE), 1)
    pushed.arrival.flags.fill_(1)
    routing.sort_choices(pushed.ids, 1, 16, 0, pushed.arrival)
    assert int(reach.faults) == Fault.KEY_ROW
    with pytest.raises(PageAccounting, match="KEY_ROW"):
        check_faults(int(reach.faults) | Fault.PEER)


def test_what_does_not_fit_is_refused() -> None:
    reach, _ = alone(1)
    ids, weights = torch.zeros(5, 2, dtype=torch.int32, device=DEVICE), torch.zeros(5, 2, device=DEVICE)
    with pytest.raises(ShapeMismatch):
        near.push(reach, values(0, 5, 128), ids, weights, 5)
    with pytest.raises(ShapeMismatch):
        near.push(reach, values(0, 2, 128), ids[:2], weights[:2], 1)
    with pytest.raises(ShapeMismatch):
        near.join_home(reach, ids[:2], values(0, 3, 128))
