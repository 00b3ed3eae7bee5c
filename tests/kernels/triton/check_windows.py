"""Windows of 128 rows, cut into steps anywhere: folded row by row, their entries have the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.triton.compress_c128 import close_c128
from engine.kernels.triton.compress_commit import Committed, commit_c128
from engine.kernels.triton.faults import no_faults
from engine.model.step import C128Entries
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.compress_cases import drawn, ints, latent_pool, turns_of


@pytest.mark.parametrize("form", ["float32", "plain"])
def test_an_entry_has_its_bits_however_steps_cut_its_window(form: str) -> None:
    width, faults = 80, no_faults(DEVICE)
    rows, rest = drawn(1, 128, 2 * width), (turns_of(3, 1), drawn(4, width), 1e-6)
    rows[:, width:] *= 2

    def entry(*cuts: int) -> Tensor:
        states, pool, start = torch.zeros(2, 3, width, device=DEVICE), latent_pool(form, width), 0
        for count in cuts:
            step = Committed(*map(ints, (1, start, 0, count, count)))
            commit_c128(states[None], rows[None, start : start + count].contiguous(), step, faults, 1)
            start += count
        columns = map(ints, (1, not start, 0, 128 - start, 2, 0))
        slots, fresh, *others = columns
        closing = C128Entries(slots, fresh != 0, *others, width=128)
        close_c128(states, rows[start:].contiguous(), closing, *rest, pool, faults, False, 1)
        return pool[2]

    whole = entry()
    for cuts in ((126,), (100, 20), (124, 1, 1, 1), (1, 17, 60, 8)):
        assert torch.equal(entry(*cuts), whole)
    assert bool(whole.any())
    assert not faults.any()
