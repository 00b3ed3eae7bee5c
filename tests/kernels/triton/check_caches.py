"""A model by kernels on FP8 caches against the same caches in plain torch, step after step."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from bench.step_compared import PURE, WRITING, ComparedOps
from bench.step_parity import OPERATION, with_operations
from engine.errors import ConfigError, PageAccounting
from engine.kernels.triton.oracle_ops import OracleOps
from engine.kernels.triton_ops import TritonOps
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import ModelConfig
from engine.model.keys import SeenKeys
from engine.model.latent_rows import read_keys, unpack_rows
from engine.model.model import DeepseekV4
from engine.model.rounding import Rounding
from engine.model.row_layout import V4_ROW
from engine.runner.batch import build_batch
from engine.runner.forward import commit_step, forward
from engine.runner.graph_layout import GraphKey, views
from engine.runner.graph_rows import pack, unfold
from engine.runner.plan import plan_step
from tests.kernels.triton.cases import DEVICE, distance, seeded
from tests.kernels.triton.check_ops import BF16, FIELDS, model

SMALL = {**FIELDS, "num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 1}

CACHES = (
    "keep_latent", "close_c4", "close_c128", "commit_c4", "commit_c128", "index_queries", "index_scores",
    "select_rows", "attend_back",
)  # fmt: skip
"""Operations that read or write caches, or lead to what does."""
SUMS = 1e-5 if DEVICE == "cpu" else 1e-3
"""Of the largest score, for sums of 128 FP8 products. The matrix unit aligns 32 products and the sum so far
to the largest of them, and keeps 14 bits: each of 4 x 33 terms loses less than 2^-13 of it, 0.016 in all if
they all lost alike. Losses of terms of both signs cancel but for their root: 1e-3 is that, and some."""


def columns(starts: dict[int, int], counts: dict[int, int], tokens: list[int]) -> RunStep:
    def column(numbers: Any) -> bytes:
        return np.asarray(list(numbers), np.int32).tobytes()

    return RunStep(
        epoch=1, mode="mixed", slots=column(counts), generations=column(1 for _ in counts),
        starts=column(starts[slot] for slot in counts), counts=column(counts.values()), tokens=column(tokens),
        samples=bytes([1] * len(counts)),
    )  # fmt: skip


class Run:
    """Steps of a model whose operations are compared one by one with plain torch; it goes on with the latter.

    at  committed tokens of each slot
    """

    def __init__(self, config: ModelConfig) -> None:
        self.kernels: DeepseekV4 = model(TritonOps(torch.device(DEVICE)), config)
        self.own, self.right = self.kernels.ops, OracleOps()
        self.state = KVState(config, 4, 5, 5, DEVICE, BF16, "fp8")
        self.at: dict[int, int] = {}
        self.compared = ComparedOps(self.own, self.right)
        # Interpreted, each operation costs seconds: what reads or writes no cache is compared elsewhere.
        for name in {*PURE, *WRITING, "norm_rotate", "route"} - set(CACHES):
            setattr(self.compared, name, getattr(self.right, name))

    def bind(self, slot: int, pages: list[tuple[int, int]], at: int = 0) -> None:
        self.state.bind(slot, 1)
        entries = [(slot, place, *page) for place, page in enumerate(pages)]
        self.state.map_pages(np.array(entries, np.int32))
        self.at[slot] = at

    def step(
        self, counts: dict[int, int], lens: dict[int, int] | None = None, *, compare: bool = True
    ) -> Tensor:
        """Logits of every row; the kernels planned the step."""
        generator = np.random.default_rng(sum(self.at.values()))
        step = columns(self.at, counts, generator.integers(2, 256, sum(counts.values())).tolist())
        plan = plan_step(self.state, step, with_operations(self.kernels, self.own), every_logit=True)
        assert all(not block.window_seen.is_floating_point() for block in plan.rows.blocks)
        with_operations(self.kernels, self.compared if compare else self.right)
        out = forward(self.kernels, self.state, plan)
        kept = list((lens or counts).values())
        commit_step(self.kernels, self.state, plan, out.pending, kept)
        self.own.check()
        for slot, count in zip(counts, kept, strict=True):
            self.at[slot] += count
        return out.logits


def test_steps_of_every_kind_agree_operation_by_operation() -> None:
    """Chunks of odd sizes, rejected rows, closing windows, selection, and a prefix that two slots share."""
    run = Run(ModelConfig.from_dict(SMALL))
    run.bind(1, [(1, 2), (2, 1)])
    run.bind(2, [(3, 3)])
    run.step({1: 121, 2: 9}, compare=False)
    run.step({1: 3, 2: 1})
    run.step({1: 6, 2: 6}, {1: 1, 2: 5})
    run.step({1: 5, 2: 1}, {1: 3, 2: 0})
    run.step({1: 256 - run.at[1]}, compare=False)
    _, halves = run.state.snapshot_rows(1)
    run.bind(3, [(1, 2), (4, 4)], at=256)
    ring = run.state.pool("c4_ring").view(len(halves), run.state.slots, 8, -1)
    ring[:, 3, 4:, : halves.shape[-1]] = halves
    run.at = {1: 256, 3: 256, 2: run.at[2]}
    shared = run.step({3: 5}, {3: 0})
    owner = run.step({1: 5}, {1: 0}, compare=False)
    # A device's library may add in another order from call to call.
    assert torch.equal(owner, shared) if DEVICE == "cpu" else distance(owner, shared) < 1e-3
    assert max(run.compared.worst.values()) < OPERATION, run.compared.worst
    assert run.compared.calls.keys() == set(CACHES)
    for name, spec in run.state.specs.items():
        assert spec.space == "slot" or not run.state.pool(name)[:, 0].view(torch.uint8).any()


def stored(config: ModelConfig, keys: int) -> tuple[KVState, Tensor]:
    """An FP8 state whose index pool has random keys, and those as numbers."""
    state = KVState(config, 3, 3, 3, DEVICE, BF16, "fp8")
    cache = state.layer(0)
    assert cache.index is not None
    assert cache.index_scales is not None
    codes = torch.randn(keys, config.index_head_dim, generator=seeded(1), device=DEVICE) * 100
    cache.index[1 : keys + 1].copy_(codes.clamp(-448, 448))
    cache.index_scales[1 : keys + 1] = 0.01
    places = torch.arange(1, keys + 1, device=DEVICE)
    return state, read_keys(cache.index, cache.index_scales, places)


def test_a_latent_in_fp8_is_what_simulated_rounding_leaves_in_bfloat16_bit_by_bit() -> None:
    config, ops = ModelConfig.from_dict(SMALL), TritonOps(torch.device(DEVICE))
    x = torch.randn(9, 512, generator=seeded(3), device=DEVICE).bfloat16()
    weight, angles = torch.rand(512, generator=seeded(4), device=DEVICE), torch.rand(9, 1, 32, device=DEVICE)
    turns, places = torch.polar(torch.ones_like(angles), angles), torch.arange(1, 10, device=DEVICE)
    coded = KVState(config, 2, 2, 2, DEVICE, BF16, "fp8").layer(0).window
    plain = KVState(config, 2, 2, 2, DEVICE, BF16).layer(0).window
    ops.keep_latent(x, weight, turns, coded, places, 1e-6, Rounding(config, "none", BF16))
    ops.keep_latent(x, weight, turns, plain, places, 1e-6, Rounding(config, "simulated", BF16))
    assert torch.equal(unpack_rows(coded[:12], V4_ROW), plain[:12])
    assert plain[1:10].any(1).all()


def test_ranges_and_pages_give_what_biases_and_rows_give() -> None:
    """Of one step the recorded form too: windows, entries, sentinel pages and padding."""
    config, ops = ModelConfig.from_dict(SMALL), TritonOps(torch.device(DEVICE))
    run = Run(config)
    run.bind(1, [(1, 2), (2, 1)])
    run.bind(2, [(3, 3)])
    run.at = {1: 300, 2: 3}
    counts = {1: 2, 2: 9}
    step = columns(run.at, counts, [5] * 11)
    ranged = plan_step(run.state, step, with_operations(run.kernels, ops))
    plain = plan_step(run.state, step, with_operations(run.kernels, PlainForm()))
    for own, other in zip(ranged.rows.blocks, plain.rows.blocks, strict=True):
        assert torch.equal(own.window_rows.long(), other.window_rows)
        for kind in ("c4", "c128"):
            assert torch.equal(getattr(own, f"{kind}_rows"), getattr(other, f"{kind}_rows"))
        for kind in ("window", "c4", "c128"):
            same_sight(getattr(own, f"{kind}_seen"), getattr(other, f"{kind}_seen"))
    batch = build_batch(
        msgspec.structs.replace(step, bucket=16), rank=0, row_tile=1, idle_runs=False, every_logit=True,
        taps=(), graph_key="", tbo_boundary=-1, cp_segments=(),
    )  # fmt: skip
    key = GraphKey(16, 3, 2, 9)
    packed = pack(run.state, batch, key).packed
    forms = [unfold(views(packed, key, config), key, run.state, each) for each in (ops, PlainForm())]
    own, other = (form.blocks[0] for form in forms)
    for kind in ("c4", "c128"):
        assert torch.equal(getattr(own, f"{kind}_rows").long(), getattr(other, f"{kind}_rows"))
    for kind in ("window", "c4", "c128"):
        same_sight(getattr(own, f"{kind}_seen"), getattr(other, f"{kind}_seen"))
    assert own.c4_chosen is not None
    assert own.c4_chosen.tolist()[:2] == [[0, 8], [0, 8]]
    assert own.c4_chosen.tolist()[2:6] == [[0, 1], [0, 1], [0, 1], [0, 1]]
    assert not own.window_seen[11:, 1].any()
    ops.check()


def same_sight(ranges: Tensor, bias: Tensor) -> None:
    """Ranges [blocks W, 2] let through what a bias [blocks, W, K] lets through."""
    column = torch.arange(bias.shape[2], device=bias.device)
    first, count = ranges[:, :1], ranges[:, 1:]
    assert torch.equal((column >= first) & (column < first + count), (bias == 0).flatten(0, 1))


class PlainForm(OracleOps):
    """Plans by biases."""

    ranged = False


def test_an_entry_of_a_page_that_nobody_has_is_a_fault() -> None:
    ops = TritonOps(torch.device(DEVICE))
    pages, visible = torch.tensor([[1, 0], [2, 9]], device=DEVICE), torch.tensor([70, 64], device=DEVICE)
    rows = ops.entry_rows(pages, visible, 128, 64, 5)
    assert rows[0].tolist() == [*range(64, 128), *[0] * 64]
    assert rows[1].tolist() == [*range(128, 192), *[0] * 64]
    assert torch.equal(rows, OracleOps().entry_rows(pages, visible, 128, 64, 5))
    with pytest.raises(PageAccounting, match="KEY_ROW"):
        ops.check()
    ops.check()


def test_coded_queries_and_keys_give_the_scores_of_their_values() -> None:
    config, kernels, plain = ModelConfig.from_dict(SMALL), TritonOps(torch.device(DEVICE)), OracleOps()
    state, keys = stored(config, 40)
    cache = state.layer(0)
    assert cache.index is not None
    q = torch.randn(3, 4, 128, generator=seeded(6), device=DEVICE).bfloat16()
    weights, angles = torch.rand(3, 4, device=DEVICE), torch.rand(3, 1, 32, device=DEVICE)
    turns, rounding = torch.polar(torch.ones_like(angles), angles), Rounding(config, "none", BF16)
    both = [ops.index_queries(q.clone(), turns, weights, rounding, True) for ops in (kernels, plain)]
    apart = (both[0][0].float() - both[1][0].float()).abs().max()
    # The transform's sums differ by a last bit, which may turn a code: by one step of the largest.
    assert float(apart) <= 32
    rows = torch.arange(41, device=DEVICE, dtype=torch.int32).expand(3, -1).contiguous()
    seen = torch.tensor([[0, 41], [0, 7], [0, 0]], device=DEVICE, dtype=torch.int32)

    given = SeenKeys(cache.index, rows, seen, cache.index_scales)
    codes, scaled = both[1][0].view(3, 1, 4, 128), both[1][1].view(3, 1, 4)
    own, right = (ops.index_scores(codes, scaled, given) for ops in (kernels, plain))
    near = SUMS * float(right[0, 0, 1:].max())
    assert torch.allclose(own, right, rtol=0, atol=near)
    by_hand = torch.einsum("h,hn->n", scaled[0, 0], (codes[0, 0].float() @ keys.T).relu())
    assert torch.allclose(own[0, 0, 1:], by_hand, rtol=0, atol=near)
    assert own[:, :, 0].isneginf().all()
    assert own[1, 0, 7:].isneginf().all()
    assert own[2].isneginf().all()


def test_rounding_that_only_codes_hold_is_refused_on_values() -> None:
    config, ops = ModelConfig.from_dict(SMALL), TritonOps(torch.device(DEVICE))
    q, turns = torch.zeros(1, 4, 128, device=DEVICE, dtype=BF16), torch.ones(1, 1, 32, device=DEVICE) + 0j
    with pytest.raises(ConfigError, match="FP8 pools"):
        ops.index_queries(q, turns, torch.zeros(1, 4, device=DEVICE), Rounding(config, "fp8", BF16), False)
