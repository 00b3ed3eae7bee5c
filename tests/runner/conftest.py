"""A tiny random model, as transformers has it and as the engine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels.cpu import CpuOps
from engine.memory.pools import KVState
from engine.model.config import ModelConfig
from engine.model.model import DeepseekV4
from engine.model.names import from_transformers
from engine.model.transformers_config import deepseek_fields
from engine.runner.step import StepRunner
from tests.runner.driver import Driver

CPU = torch.device("cpu")
SLOTS, PAGES = 6, 40


@pytest.fixture(scope="session")
def peer() -> Any:
    """transformers' model in float32 with every parameter random."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.DeepseekV4Config(
        vocab_size=256, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, qk_rope_head_dim=16, q_lora_rank=64, o_groups=2, o_lora_rank=32,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, compress_ratios=[0, 4, 128, 4, 128],
        num_hash_layers=2, sliding_window=32, index_n_heads=32, index_head_dim=32, index_topk=16, hc_mult=4,
        hc_sinkhorn_iters=20, hc_eps=1e-6, swiglu_limit=10.0, rope_theta=10000, compress_rope_theta=160000,
        rope_parameters={
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        routed_scaling_factor=1.5, rms_norm_eps=1e-6, max_position_embeddings=2048, bos_token_id=0,
        eos_token_id=1, num_nextn_predict_layers=1,
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "tid2eid" in name:
                tensor.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(256)]))
            elif tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            else:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="session")
def model(peer: Any) -> DeepseekV4:
    """The engine's model of the same weights."""
    config = ModelConfig.from_dict(deepseek_fields(peer.config.to_dict()))
    weights = from_transformers(peer.state_dict())
    return DeepseekV4(
        config, weights, device="cpu", dtype=torch.float32, deterministic=True, kv_rounding="none"
    )


@pytest.fixture(scope="session")
def native(peer: Any) -> DeepseekV4:
    """The same weights on the C kernels, which run small steps unpadded."""
    config = ModelConfig.from_dict(deepseek_fields(peer.config.to_dict()))
    return DeepseekV4(
        config, from_transformers(peer.state_dict()), device="cpu", dtype=torch.float32, deterministic=True,
        kv_rounding="none", ops=CpuOps(),
    )  # fmt: skip


@pytest.fixture
def driver(model: DeepseekV4) -> Driver:
    """A runner with an empty cache, and a hand to plan its steps."""
    state = KVState(model.config, SLOTS, PAGES, PAGES, CPU, torch.float32)
    return Driver(StepRunner(model, state, (1,)))
