"""A whole model by the kernel set against the same model by plain torch with the same roundings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.step_compared import PURE, WRITING, ComparedOps
from bench.step_parity import FAR, OPERATION, Differs, judged, rows_apart, with_operations
from engine.config import Settings
from engine.errors import ConfigError, ShapeMismatch
from engine.kernel_sets import operations
from engine.kernels.triton import head, oracle, quantise
from engine.kernels.triton.oracle_ops import OracleOps
from engine.kernels.triton_ops import TritonOps, check_device
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import KVFormat, ModelConfig
from engine.model.dummy import DummyWeights
from engine.model.layout import DEEPSEEK_LAYOUT
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.step import Pending, StepOutput
from engine.model.weights import HeadWeights
from engine.runner.forward import commit_step, forward
from engine.runner.plan import plan_step
from engine.start_memory import weights_by_kind
from tests.kernels.triton.cases import DEVICE, distance, seeded, values

FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 256, "hidden_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "sliding_window": 128,
    "index_n_heads": 4, "index_head_dim": 128, "index_topk": 8, "hc_mult": 4, "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6, "swiglu_limit": 10.0, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BF16 = torch.bfloat16
SPREAD = {"expert_rows", "join_choices", "pack", "unpack"}
"""Operations of experts that other ranks have."""


def model(ops: TorchOps, config: ModelConfig) -> DeepseekV4:
    weights = DummyWeights(config, BF16, torch.device(DEVICE), seed=3, layout=DEEPSEEK_LAYOUT)
    return DeepseekV4(
        config, weights, device=DEVICE, dtype=BF16, deterministic=False, kv_rounding="none", ops=ops
    )


def step(starts: list[int], counts: list[int], seed: int) -> RunStep:
    def column(numbers: Any) -> bytes:
        return np.asarray(numbers, np.int32).tobytes()

    tokens = np.random.default_rng(seed).integers(2, 256, sum(counts))
    return RunStep(
        epoch=seed, mode="mixed", slots=column([1, 2]), generations=column([1, 1]), starts=column(starts),
        counts=column(counts), tokens=column(tokens), samples=b"\1\1",
    )  # fmt: skip


def state(config: ModelConfig, kv: KVFormat = "model") -> KVState:
    made = KVState(config, 3, 3, 3, DEVICE, BF16, kv)
    for slot in (1, 2):
        made.bind(slot, 1)
    made.map_pages(np.array([[1, 0, 1, 2], [2, 0, 2, 1]], np.int32))
    return made


def test_a_model_by_kernels_is_the_model_by_torch() -> None:
    """Layers of every ratio, hashed and learned routing; the step closes c4 and c128 windows and selects."""
    config = ModelConfig.from_dict(FIELDS)
    plain, kernels, held = OracleOps(), model(TritonOps(torch.device(DEVICE)), config), state(config)
    own = kernels.ops
    with_operations(kernels, plain)
    prompt = plan_step(held, step([0, 0], [126, 71], 1), kernels)
    commit_step(kernels, held, prompt, forward(kernels, held, prompt).pending)
    plan = plan_step(held, step([126, 71], [2, 1], 2), kernels, every_logit=True)
    assert plan.rows.c4 is not None
    assert len(plan.rows.c128) == 1
    # A forward commits nothing, so all begin at the same state.
    wanted = forward(kernels, held, plan)
    compared = ComparedOps(own, plain)
    forward(with_operations(kernels, compared), held, plan)
    own.check()
    every = (
        {*PURE, *WRITING, "norm_rotate", "route"}
        - {"collapse", "commit_c4", "commit_c128", "rms_norm", "rotate"}
        - SPREAD
    )
    assert compared.calls.keys() == every
    assert max(compared.worst.values()) < OPERATION, compared.worst
    ring, states = held.pool("c4_ring").clone(), held.pool("c128_state").clone()
    commit_step(with_operations(kernels, compared), held, plan, wanted.pending, [1, 1])
    assert compared.worst["commit_c4"] == 0
    assert compared.worst["commit_c128"] < 1e-6
    held.pool("c4_ring").copy_(ring)
    held.pool("c128_state").copy_(states)
    out = forward(with_operations(kernels, own), held, plan)
    assert len(rows_apart(out, wanted)) == 3 * 3
    assert judged(out, wanted)["largest"] < FAR
    pending = Pending(-out.pending.c4, -out.pending.c128, out.pending.taps)
    with pytest.raises(Differs):
        judged(StepOutput(out.logits, pending), wanted)


def test_experts_of_another_rank_leave_zero_rows() -> None:
    config = ModelConfig.from_dict(FIELDS)
    moe, ops = (
        model(TritonOps(torch.device(DEVICE)), config).layers[1].weights.moe,
        TritonOps(torch.device(DEVICE)),
    )
    x, weights = values(1, 5, 256), torch.rand(5, 2, generator=seeded(1), device=DEVICE)
    ids = torch.tensor([[0, -3], [9, 8], [1, 7], [-1, -1], [5, 6]], device=DEVICE, dtype=torch.int32)
    out = ops.expert_rows(x, ids, weights, moe, 10.0)
    outside = (ids < 0) | (ids >= 8)
    assert not out[outside].any()
    assert distance(out, OracleOps().expert_rows(x, ids.long(), weights, moe, 10.0)) < 6e-3
    shared = values(2, 3, 256)
    other = torch.zeros_like(out)
    other[0, 1] = out[0, 0]
    parts = torch.stack([out, other])
    joined = ops.join_choices(parts, shared)
    assert joined.dtype == BF16
    assert distance(joined, TorchOps().join_choices(parts, shared)) < 4e-3
    both = ops.shared_expert(x, moe, 10.0), OracleOps().shared_expert(x, moe, 10.0)
    assert distance(*both) < 6e-3


@pytest.mark.parametrize(("count", "rows"), [(0, 2), (3, 3), (3, 5)])
def test_rows_arrive_as_they_were_sent(count: int, rows: int) -> None:
    kernels, plain = TritonOps(torch.device(DEVICE)), TorchOps()
    x, weights = values(1, count, 192), torch.rand(count, 3, generator=seeded(1), device=DEVICE)
    ids = torch.randint(-1, 9, (count, 3), generator=seeded(2), device=DEVICE, dtype=torch.int32)
    packed = kernels.pack(x, ids, weights, rows)
    assert torch.equal(packed, plain.pack(x, ids, weights, rows))
    both = kernels.unpack(packed, x, 3, 4), plain.unpack(packed, x, 3, 4)
    assert all(torch.equal(own, right) for own, right in zip(*both, strict=True))
    assert torch.equal(both[0][1][:count], ids - 4)
    assert not both[0][0][count:].any()
    assert bool((both[0][1][count:] == -5).all())
    with pytest.raises(ShapeMismatch):
        kernels.pack(x.float(), ids, weights, rows)


@pytest.mark.parametrize("rows", [0, 3])
def test_collapse_with_and_without_norm(rows: int) -> None:
    generator = seeded(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    own = HeadWeights(drawn(4, 4 * 192) / 28, drawn(4), drawn(1), drawn(192), drawn(1, 1))
    streams = drawn(rows, 4, 192).to(BF16)
    out, wanted = TritonOps(torch.device(DEVICE)), TorchOps()
    for name in ("collapse", "head_rows"):
        got = getattr(out, name)(streams, own, 1e-6, 1e-6)
        right = getattr(wanted, name)(streams, own, 1e-6, 1e-6)
        assert (got.shape, got.dtype) == (right.shape, right.dtype)
        assert not rows or distance(got, right) < 4e-3
    assert head.collapse(streams, own, 1e-6, 1e-6, normed=True).dtype == BF16


def test_swiglu_is_the_products_input() -> None:
    gate_up = values(4, 5, 512)
    codes, scales = quantise.swiglu(gate_up, 7.0)
    right = oracle.quantise(TorchOps().swiglu(gate_up, 7.0).to(BF16))
    assert torch.equal(scales, right[1])
    # exp differs by a last bit, which may turn a rounding.
    assert float((codes.float() - right[0].float()).abs().max()) <= 32
    assert distance(codes.float(), right[0].float()) < 4e-3


def test_kernels_refuse_older_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match=r"9\.0, not 8\.9"):
        check_device(torch.device("cuda"), BF16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    check_device(torch.device("cuda"), BF16)


def test_kernels_refuse_other_types() -> None:
    with pytest.raises(ConfigError, match="float32"):
        check_device(torch.device("cuda"), torch.float32)
    check_device(torch.device(DEVICE), BF16)
    chosen = operations(Settings(device=DEVICE, dtype="bfloat16", kernels="triton"))
    assert isinstance(chosen, TritonOps)
    kept = model(chosen, ModelConfig.from_dict(FIELDS))
    # Three layers of eight experts of three matrices, at 4 bits and an eighth of a byte of scales.
    assert weights_by_kind(kept, None)["routed experts"] == 3 * 8 * 3 * 256 * 128 * 17 // 32
