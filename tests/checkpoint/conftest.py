"""A synthetic checkpoint of real head geometry, small enough to write in a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.dummy import dummy_weights
from engine.model.export import write_checkpoint
from engine.model.layout import expected_tensors
from engine.model.tensor_specs import Draft, Layout, Role, Storage

FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 4096,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
}

DSPARK_FIELDS = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 300,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 64,
}


@pytest.fixture(scope="session")
def fields() -> dict[str, Any]:
    """Content of a config.json."""
    return FIELDS


@pytest.fixture(scope="session")
def weights() -> dict[str, Tensor]:
    """Random float32 backbone weights of that geometry."""
    return dummy_weights(ModelConfig.from_dict(FIELDS), torch.float32, torch.device("cpu"), seed=7)


@pytest.fixture(scope="session")
def quantised_folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    """The weights in DeepSeek's layout, in many shards; never changed by a test."""
    folder = tmp_path_factory.mktemp("quantised")
    write_checkpoint(folder, FIELDS, weights, quantised=True, max_shard_bytes=1 << 20)
    return folder


@pytest.fixture(scope="session")
def dspark_fields() -> dict[str, Any]:
    """Content of a config.json with the draft's own fields."""
    return FIELDS | DSPARK_FIELDS


DraftWeights = Callable[[dict[str, Any], Draft, int], dict[str, Tensor]]


@pytest.fixture(scope="session")
def draft_weights() -> DraftWeights:
    """Makes random weights of draft stages alone, from fields, kind and number of stages."""
    return _draft_weights


def _draft_weights(fields: dict[str, Any], draft: Draft, stages: int) -> dict[str, Tensor]:
    config = ModelConfig.from_dict(fields)
    layout = Layout(Storage.FLOAT, Storage.FLOAT, draft, stages)
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(spec.shape, generator=generator)
        for name, spec in expected_tensors(config, layout).items()
        if name.startswith("mtp.") and spec.role is not Role.SCALE
    }
