"""What a device's first session shows of two ranks' captured steps, with gloo in place of NCCL."""

from __future__ import annotations

import pytest

from tests.kernels.triton import graph_ranks
from tests.kernels.triton.graph_ranks import STEPS, told_by_ranks


@pytest.mark.slow
def test_recorded_steps_of_two_ranks_are_eager_ones_and_all_of_it_ends_in_order() -> None:
    told = list(told_by_ranks("cpu"))
    assert told[0] == "2 steps with collectives captured"
    assert len(told) == 1 + len(STEPS) + 1
    assert told[-1].endswith("all ended with 0")


def test_ranks_that_tell_different_things_are_a_failure() -> None:
    with pytest.raises(RuntimeError, match="different things"):
        graph_ranks._same(["captured", "closed"])
