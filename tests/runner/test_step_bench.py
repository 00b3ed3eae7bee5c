"""`bench step` at a tiny size: its rows are whole, its floor is the formula, a rank that fails is told."""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import step
from bench.step import FLASH, StepFailed, _hear, slowest
from bench.step_case import Case, Context, cases, filled, planned, shortened
from bench.step_floor import Routed, Work, context_work, experts_work, weights_work
from bench.step_rank import Job, measure
from bench.step_time import PARTS, parts_of
from engine.config import Settings
from engine.memory.pools import KVState
from engine.model.config import ModelConfig
from engine.model.expert_weights import ExpertWeights, MoeWeights
from engine.model.groups import ALONE
from engine.model.latent_rows import read_keys, read_latents
from engine.model.layout import DEEPSEEK_LAYOUT, expected_tensors
from engine.model.ops import TorchOps
from engine.model.quantised import Fp4Experts, Fp8Weight
from engine.model.tensor_specs import Role
from tests.runner.faulty_parts import Asked, AskedJob, planted_rank, unloadable_rank

CPU = torch.device("cpu")
KERNELS = Path(__file__).parents[2] / "engine/kernels/triton"
TINY = {
    "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 2,
    "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 32, "o_groups": 1, "o_lora_rank": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 32,
    "index_topk": 16, "max_position_embeddings": 4096,
}  # fmt: skip


def fields(**changes: Any) -> dict[str, Any]:
    real = json.loads((FLASH / "config.json").read_text())
    return {name: value for name, value in real.items() if not name.startswith("dspark_")} | changes


def test_the_real_geometry_has_the_tensors_and_bytes_of_the_release() -> None:
    config = ModelConfig.from_json(FLASH)
    specs = expected_tensors(config, DEEPSEEK_LAYOUT)
    experts = [spec for name, spec in specs.items() if ".experts." in name]
    size = sum(spec.shape[0] * spec.shape[1] for spec in experts)
    assert size == 43 * 256 * 13_369_344
    assert [config.compress_ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    eighths = [spec for spec in specs.values() if spec.role is Role.FP8 and any(n % 128 for n in spec.shape)]
    assert not eighths, "no matrix of the release has ragged squares"
    few = shortened(config, 5)
    assert (few.num_hidden_layers, few.compress_ratios) == (5, (0, 0, 4, 128, 4))
    assert shortened(config, 0) is config


def test_every_kind_runs_and_tells_its_floor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields(**TINY)))
    settings = Settings(model_path=str(tmp_path), load_format="dummy", kernels="torch", threads=1)
    near, far = multiprocessing.Pipe()
    job = Job(settings, 4, cases([3], [200], [20]), 2, parity=True)
    measure(job, ALONE, CPU, far)
    assert near.recv() == ("parity", {})
    kind, loaded = near.recv()
    assert (kind, loaded["kernels"], loaded["layers"]) == ("loaded", "torch", 4)
    rows = [near.recv()[1] for _ in job.cases]
    assert not near.poll()
    assert [(row["kind"], row["rows_per_rank"]) for row in rows] == [
        ("decode", 3),
        ("verify", 18),
        ("prefill", 20),
    ]
    for row in rows:
        assert 0 < row["floor_ms"] * 0.99 <= max(row["ms"], row["floor_ms"])
        assert row["choices"] == row["rows_per_rank"] * 2
        assert 1 < row["distinct_experts"] <= 8
        assert not row["graph"]
        assert row["breakdown"] == []
        assert row["peer_bytes"] == 0
    weights = sum(
        size for name, size in loaded["weights_mib"].items() if name not in ("embedding", "routed experts")
    )
    every = 4 * 8 * 3 * 64 * 64 * 4
    assert rows[1]["bytes"] > rows[0]["bytes"] > weights * 2**20 - 3 * 256 * 2 * 8
    assert (
        rows[0]["bytes"]
        < weights * 2**20 + every * rows[0]["distinct_experts"] / 8 + 3 * 4 * (300 * 96 + 200) * 4
    )


def test_contexts_in_fp8_are_of_the_same_size() -> None:
    config = replace(
        ModelConfig.from_dict(fields(**TINY, num_hidden_layers=4, num_hash_layers=1)), head_dim=96
    )
    state, every = (
        filled(config, Case("verify", 12, 600, graph=True), CPU, torch.bfloat16, "fp8"),
        torch.arange(1, 300),
    )
    cache = state.layer(2)
    assert cache.c4 is not None
    assert cache.index is not None
    latents = read_latents(cache.c4, every, torch.empty(config.head_dim))
    keys = read_keys(cache.index, cache.index_scales, every)
    assert all(bool((part.std(0) > 0.8).all()) for part in (latents, keys))
    assert not cache.c4[0].any()


def test_contexts_are_there_without_a_prefill() -> None:
    config = ModelConfig.from_dict(fields(**TINY, num_hidden_layers=4, num_hash_layers=1))
    case = Case("verify", 12, 600, graph=True)
    state = filled(config, case, CPU, torch.float32)
    assert state.lengths.tolist()[1:] == case.lengths() == [600, 637]
    pages = Context(case, config.sliding_window)
    # Logical pages 0 to 2 of both, of windows those that hold positions from 473 and 510 on.
    assert (pages.full_pages, pages.window_pages) == (7, 5)
    assert not state.pool("c4")[:, 0].any()
    assert bool((state.pool("c4")[:, 1:].std(1) > 0.9).all())

    class Plain:
        """What a plan asks of a model."""

        groups, row_tile, needs_every_rank, single_rows, ops = ALONE, 1, False, False, TorchOps()

    Plain.config = config  # type: ignore[attr-defined]
    plan = planned(state, case, Plain(), 1, 0)
    assert plan.rows.positions.tolist() == [*range(600, 606), *range(637, 643)]
    assert plan.rows.c4 is not None


def test_the_floor_counts_what_a_request_reads() -> None:
    config = ModelConfig.from_json(FLASH)
    state = KVState(shortened(config, 4), 2, 2, 2, CPU, torch.bfloat16)
    far, near = Case("decode", 1, 65_535, graph=True), Case("decode", 1, 1023, graph=True)
    window = 128 * 1024
    assert context_work(config, state, 0, far).bytes == window
    assert context_work(config, state, 2, far).bytes == window + 512 * 1024 + 16_384 * 256
    assert context_work(config, state, 3, far).bytes == window + 512 * 1024
    # 256 entries are all seen: nothing is selected.
    assert context_work(config, state, 2, near).bytes == window + 256 * 1024
    weight = Fp8Weight(torch.zeros(256, 128, dtype=torch.float8_e4m3fn), torch.zeros(2, 1, dtype=torch.uint8))
    assert weights_work(weight, 3) == Work(256 * 128 + 2, 2.0 * 3 * 256 * 128, 0.0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    packed = Fp4Experts(codes(4, 1, 256, 64), codes(4, 1, 256, 4), codes(4, 1, 128, 64), codes(4, 1, 128, 4))
    moe = MoeWeights(torch.zeros(4, 128), None, torch.zeros(9, 2), packed, weight, weight)
    assert experts_work(moe, Routed(3, 5)) == Work(3 * 3 * 128 * 68 + 8 * 5, 2.0 * 5 * 3 * 128 * 128, 0.0)
    floats = MoeWeights(
        moe.gate,
        torch.zeros(4),
        None,
        ExpertWeights(torch.zeros(4, 256, 128), torch.zeros(4, 128, 128)),
        weight,
        weight,
    )
    assert experts_work(floats, Routed(1, 2)).bytes == 3 * 128 * 128 * 4
    # The gate alone: routed experts and tables are counted by what is chosen.
    assert weights_work(moe, 1).bytes == 4 * 128 * 4 + 2 * weight.nbytes


def test_kernels_are_summed_by_what_they_are_for() -> None:
    seen = [
        (1.0, "_linear"),
        (2.0, "_gate_up"),
        (0.5, "ncclDevKernel_SendRecv"),
        (0.25, "sm90_xmma_gemm_bf16"),
    ]
    told = parts_of([*seen, (0.125, "elementwise_kernel"), (0.125, "_combine_parts")])
    assert told == {
        "experts": 2.0, "dense products": 1.25, "between ranks": 0.5, "other": 0.125, "attention": 0.125,
    }  # fmt: skip


def test_every_kernel_of_a_forward_is_for_something() -> None:
    choosing = ("accept", "draws", "logits", "markov", "masks")
    files = [path for path in KERNELS.glob("*.py") if not path.stem.startswith(choosing)]
    launched = {name for path in files for name in re.findall(r"\b(_\w+)\[(?:grid|\()", path.read_text())}
    assert launched == {name for name in chain(*PARTS.values()) if name.startswith("_")}


def test_the_slowest_rank_gives_the_row_and_a_failed_one_its_words() -> None:
    told = [
        {"ms": 2.0, "distinct_experts": 3.0, "bytes": 5},
        {"ms": 4.0, "distinct_experts": 2.0, "bytes": 6},
    ]
    assert slowest(told)["bytes"] == 6
    assert slowest(told)["ms_of_ranks"] == [2.0, 4.0]
    near, far = multiprocessing.Pipe()
    far.send(("failed", "out of pages"))
    with pytest.raises(StepFailed, match="rank 0: out of pages"):
        _hear([(near, None)], "row", 10.0)


def test_cases_are_measured_behind_those_that_fail_die_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "live", planted_rank)
    monkeypatch.setattr(step, "CASE_S", 2.0)
    job: Any = AskedJob([*(Asked("decode", rows) for rows in (1, 2, 3, 4)), Asked("verify", 6)], parity=True)
    figures = step.measure(job)
    assert [row["rows_per_rank"] for row in figures["rows"]] == [1, 6]
    assert figures["rates"] == {"read": 1.0}
    assert {name: step.last_line(why) for name, why in figures["failures"].items()} == {
        "parity": "operations differ",
        "decode of 2 rows at 100": "no rank of 2 told row within 2 s; 1 had",
        "decode of 3 rows at 100": "rank 1 ended with -9",
        "decode of 4 rows at 100": "rank 1: an illegal address",
    }
    monkeypatch.setattr(step, "live", unloadable_rank)
    figures = step.measure(job)
    assert list(figures["failures"]) == ["loading"]
    assert figures["rows"] == []


def test_nothing_begins_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "live", planted_rank)
    job: Any = AskedJob([Asked("decode", 1), Asked("verify", 6)], parity=False)
    assert step.measure(job, 1e-9)["failures"] == {
        "loading": "not begun, with 2 cases left: the time is over"
    }
