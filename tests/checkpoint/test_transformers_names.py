"""Files that the transformers library writes load to the same tensors as its state dict holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint import load_checkpoint, open_checkpoint
from engine.model.config import ModelConfig
from engine.model.names import from_transformers
from engine.model.transformers_config import deepseek_fields

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "sliding_window": 32,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A small model with every parameter and buffer random."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.DeepseekV4Config(**TINY)
    built = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in built.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(0, TINY["n_routed_experts"])
    return built


def load(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    return load_checkpoint(folder, torch.float32, torch.device("cpu"), progress=lambda *_: None)


@pytest.mark.filterwarnings("ignore")
def test_save_pretrained_folders_load_to_the_models_own_tensors(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path)
    config, loaded = load(tmp_path)
    expected = from_transformers(model.state_dict())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name].to(loaded[name].dtype)) for name in loaded)
    assert config.compress_ratios == (0, 4, 128, 4)
    assert config.yarn is not None
    assert config.yarn.factor == 16
    assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)
    assert config.num_hash_layers == 2


def test_plain_state_dicts_with_stacked_experts_load_too(tmp_path: Path, model: Any) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "deepseek_v4"} | EXTRA_FIELDS))
    _, loaded = load(tmp_path)
    expected = from_transformers(state)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name].to(loaded[name].dtype)) for name in loaded)


EXTRA_FIELDS = {
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
}


def test_a_missing_stack_of_experts_is_named_by_expert(tmp_path: Path, model: Any) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del state["model.layers.2.mlp.experts.down_proj"]
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "deepseek_v4"} | EXTRA_FIELDS))
    with pytest.raises(CheckpointError, match=r"layers\.2\.ffn\.experts\.0\.w2\.weight is missing"):
        open_checkpoint(tmp_path)


def test_unknown_layer_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear_attention"):
        deepseek_fields({"layer_types": ["linear_attention"]})
    with pytest.raises(ConfigError, match="behind a routed one"):
        deepseek_fields({"mlp_layer_types": ["moe", "hash_moe"]})
