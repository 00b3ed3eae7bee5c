"""What a plan refuses, and what a batch always carries."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from engine.errors import ConfigError, PageAccounting, ShapeMismatch
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import ModelConfig
from engine.model.groups import ALONE
from engine.model.ops import TorchOps
from engine.runner.batch import RankLoad, build_batch
from engine.runner.plan import plan_step

FIELDS = {
    "model_type": "deepseek_v4", "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 16, "o_groups": 1,
    "o_lora_rank": 16, "sliding_window": 128, "compress_ratios": [0, 4, 128], "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5, "max_position_embeddings": 1024, "index_n_heads": 2, "index_head_dim": 32,
    "index_topk": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "num_hash_layers": 0, "routed_scaling_factor": 1.0, "swiglu_limit": 10.0,
    "hc_mult": 4, "hc_sinkhorn_iters": 3, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0,
    "eos_token_id": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip


def single(row_tile):
    """What a plan asks a model of a single rank."""
    return SimpleNamespace(
        row_tile=row_tile, single_rows=row_tile > 1, groups=ALONE, needs_every_rank=False, ops=TorchOps()
    )


EAGER = single(row_tile=1)


@pytest.fixture
def state():
    """Slot 1 holds 300 tokens' pages, slot 2 has none."""
    made = KVState(ModelConfig.from_dict(FIELDS), 4, 8, 8, "cpu", torch.float32)
    made.bind(1, 5)
    made.bind(2, 1)
    made.map_pages(np.array([[1, 0, 3, 4], [1, 1, 2, 6]], dtype=np.int32))
    return made


def step(slots, starts, counts, *, generations=None, tokens=None, samples=None) -> RunStep:
    """A RunStep of given columns."""
    columns = [slots, generations or [5] * len(slots), starts, counts, tokens or [0] * sum(counts)]
    packed = [np.array(column, dtype=np.int32).tobytes() for column in columns]
    return RunStep(
        1, "mixed", *packed, samples=np.array(samples or [1] * len(slots), dtype=np.uint8).tobytes()
    )


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (step([1], [0], [1], generations=[4]), PageAccounting, "slot 1 is at generation 5"),
        (step([2], [0], [1], generations=[1]), PageAccounting, "position 0 of slot 2 has no page"),
        (step([1], [510], [3]), PageAccounting, "position 512 of slot 1 has no page"),
        (step([1], [1023], [2]), PageAccounting, "past the page table"),
        (step([1], [0], [2], tokens=[1]), ShapeMismatch, "against 1 tokens"),
        (step([1], [0], [0]), ShapeMismatch, "counts"),
        (step([1], [0, 1], [1]), ShapeMismatch, "columns"),
    ],
)
def test_a_wrong_step_is_refused_before_it_runs(state, made, error, words):
    with pytest.raises(error, match=words):
        plan_step(state, made, EAGER)


@pytest.mark.parametrize("page", [[1, 4, 1, 1], [1, 0, 8, 1], [1, 0, 1, 8]])
def test_a_page_outside_the_pools_is_refused(state, page):
    with pytest.raises(PageAccounting):
        state.map_pages(np.array([page], dtype=np.int32))


@pytest.mark.parametrize("slot", [0, 4])
def test_the_sink_slot_and_slots_past_the_end_are_never_bound(state, slot):
    with pytest.raises(PageAccounting):
        state.bind(slot, 1)


def test_a_cache_without_room_beside_the_sinks_is_refused(state):
    with pytest.raises(ConfigError):
        KVState(state.config, 1, 8, 8, "cpu", torch.float32)


def test_a_batch_carries_every_rank_and_its_raw_live_and_padded_tokens():
    agreed = msgspec.structs.replace(
        step([1, 2], [9, 0], [3, 2], samples=[1, 0]), ranks=((-1, 7, 3), (-1, 5, 1), (0, 0, 0))
    )
    batch = built(agreed)
    assert batch.loads == (RankLoad(-1, 7, 7, 8, 3), RankLoad(2, 5, 5, 8, 1), RankLoad(0, 0, 0, 4, 0))
    assert batch.load == batch.loads[1]
    assert (batch.agreed_rows, batch.agreed_logits) == (8, 3)
    assert batch.logit_rows.tolist() == [2]
    graph = built(msgspec.structs.replace(agreed, bucket=16))
    assert [load.padded_tokens for load in graph.loads] == [16, 16, 16]
    assert graph.agreed_rows == 16


def test_a_step_that_differs_from_what_the_ranks_agreed_on_is_refused():
    agreed = msgspec.structs.replace(step([1], [0], [3]), ranks=((1, 1, 1), (1, 1, 1)))
    with pytest.raises(ShapeMismatch, match="3 tokens, but the ranks agreed on 1"):
        built(agreed)


def built(agreed):
    return build_batch(
        agreed, rank=1, row_tile=4, idle_runs=True, every_logit=False, taps=(2,), graph_key="",
        tbo_boundary=-1, cp_segments=(),
    )  # fmt: skip


def test_a_position_without_a_full_page_is_refused(state):
    state.map_pages(np.array([[1, 1, 0, 6]], dtype=np.int32))
    with pytest.raises(PageAccounting, match="position 256 of slot 1 has no page"):
        plan_step(state, step([1], [250], [7]), EAGER)


def test_padding_writes_the_sink_and_never_its_first_row(state):
    plan = plan_step(state, step([1], [0], [5]), single(row_tile=8))
    assert plan.rows.latent_rows.tolist() == [1024, 1025, 1026, 1027, 1028, 1, 1, 1]
    assert bool(plan.rows.blocks[0].window_seen[5:].isneginf().all())


def test_window_keys_are_the_last_128_positions_through_the_page_table(state):
    """Position 257 stands in the second page; its window begins in the first one."""
    rows = plan_step(state, step([1], [257], [1]), EAGER).rows.blocks[0].window_rows[0]
    assert rows.tolist() == [4 * 256 + p for p in range(130, 256)] + [6 * 256, 6 * 256 + 1]
