"""How often kernels are compiled: not anew for each number of requests or rows, in no need of a device."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from engine.kernel_sets import choices
from engine.kernels.near_planes import planes
from engine.kernels.triton import combine, experts, library, project, routing
from engine.kernels.triton.linear import MANY_ROWS
from engine.kernels.triton.near import Reach, join_home, push
from engine.kernels.triton_ops import TritonOps
from engine.messages import Sampling, SlotBind
from engine.model.draft import BlockChoose
from engine.model.group_stats import GroupStats
from engine.model.quantised import Fp8Weight
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.edits import MaskWords
from engine.runner.sampling import Rows
from engine.warm_up import chunk_sizes
from tests.kernels.triton.cases import fp8_weight
from tests.kernels.triton.check_compile import HOPPER

CPU, GAMMA, SLOTS = torch.device("cpu"), 5, 40
VOCAB = 1280
"""A multiple of 16, in as odd a number of groups of 128 as the real one: 10 beside 1010."""
KINDS = {
    "_best": 1, "_bias": 2, "_choose": 1, "_count": 2, "_draw": 2, "_edit": 8, "_group_stats": 6, "_judge": 2,
    "_replace": 2, "_search": 1, "_spread": 2, "_sums": 2,
}  # fmt: skip
"""Few rows or many, rows of drafts or single ones, with masks or without, with or without drafts' logits."""
BATCHES = (1, 2, 3, 8, 15, 16, 17, 32)
WEIGHT = Fp8Weight(*fp8_weight(1, 128, 2048))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """By kernel, what a device would compile it for; nothing is launched."""
    backend, found = make_backend(HOPPER), defaultdict(set)

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = create_function_from_signature(self.signature, self.params, backend)
        _, specialised, options = binder(*args, **kwargs)
        found[self.__name__].add(f"{specialised} {options}")

    monkeypatch.setattr(JITFunction, "run", note)
    return found


def test_the_number_of_requests_compiles_nothing_anew(compiled: dict[str, set[str]]) -> None:
    """Plain steps, rounds with drafts of a block and of single positions, with masks and without.

    And nothing is compiled behind the start, whose steps draft by themselves.
    """
    way = choices(TritonOps(CPU), SLOTS, VOCAB, (1,), CPU)
    tokens = np.asarray([3, 4], np.int32).tobytes()
    for slot in range(SLOTS):
        way.bind(SlotBind(slot, 0, slot, 0, Sampling(9, seeded=slot == SLOTS - 1), 2, tokens))
    w1 = torch.zeros(VOCAB, 8, dtype=torch.bfloat16)
    way.warm(SLOTS - 1, GAMMA)
    warm = {name: set(kinds) for name, kinds in compiled.items()}
    for count in BATCHES:
        slots, positions = tuple(range(count)), tuple(range(7, 7 + count))
        choose = way.choose(slots, positions)
        assert isinstance(choose, BlockChoose)
        z = torch.empty(GAMMA, count, VOCAB)
        ids, stats = choose.block(z, torch.zeros(count, dtype=torch.int64), w1, w1)
        assert isinstance(stats, GroupStats)
        for k in range(GAMMA):
            choose(k, z[k])
        for lens in (np.full(count, GAMMA + 1), np.arange(count) % (GAMMA + 1) + 1):
            rows = int(lens.sum())
            words = torch.zeros(rows, VOCAB // 32, dtype=torch.int32)
            for mask in (None, MaskWords(words, np.arange(rows)).part(rows // 2, rows)):
                for q, known in ((z.transpose(0, 1), stats), (z.transpose(0, 1), None), (None, None)):
                    wanted = VerifyRows(slots, positions, lens, ids, q, known)
                    way.accept(torch.empty(rows, VOCAB), wanted, mask)
                own = None if mask is None else mask.part(rows - count, rows)
                way.sample(torch.empty(rows, VOCAB)[rows - count :], Rows(slots, positions), own)
        way.logprobs(z[0], ids[:, 0], [count])
    assert {name: len(kinds) for name, kinds in compiled.items()} == KINDS
    later = {name for name, kinds in compiled.items() if kinds - warm.get(name, set())}
    assert later == {"_bias"}, "a start compiles all but what needs the Markov head's weights"


def sized(rows: int, agreed: int) -> None:
    """Launches what takes several numbers that go with a step's rows; this rank's, and what all agreed on."""
    ids = torch.zeros(agreed, 6, dtype=torch.int32)
    routing.sort_choices(ids, 256, experts.shape_for(ids.numel(), 256).rows)
    turns, faults = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    own = planes(2, 8200, 128, 6)
    reach = Reach(1, own, torch.empty(own.bytes, dtype=torch.uint8), turns, turns, faults, 10**9)
    own_ids = torch.zeros(rows, 6, dtype=torch.int32)
    pushed = push(reach, torch.empty(rows, 128).bfloat16(), own_ids, torch.empty(rows, 6), agreed)
    routing.sort_choices(pushed.ids, 128, 16, 128, pushed.arrival)
    join_home(reach, own_ids, torch.empty(rows, 128))
    combine.join(torch.empty(2, agreed, 6, 128), torch.empty(rows, 128))
    # A step's columns are sent behind each other.
    phase = torch.zeros(6, rows, dtype=torch.int64)[3]
    project.add_parts(torch.empty(1, rows, 64), torch.empty(4, 64), phase, torch.empty(rows, 64))
    if rows > MANY_ROWS:
        library.library_scales(torch.empty(rows, 16), WEIGHT)


def test_prompts_of_any_size_compile_nothing_behind_the_start(compiled: dict[str, set[str]]) -> None:
    for rows in (1, *chunk_sizes(8192)):
        sized(rows, rows)
    warm = {name: set(kinds) for name, kinds in compiled.items()}
    assert warm.keys() == {"_push", "_count", "_sort", "_join_home", "_join", "_add", "_library_scales"}
    for rows in (3, 5, 7, 12, 24, 40, 96, 100, 136, 160, 300, 777, 1000, 4100, 8000):
        sized(rows, rows)
        sized(1, rows)
    assert compiled == warm
