"""A config.json is read whole, and what contradicts itself is refused by name."""

from __future__ import annotations

import json

import pytest

from engine.errors import ConfigError
from engine.model.config import ModelConfig, pools

FLASH = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0], "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "num_hash_layers": 3, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    "num_nextn_predict_layers": 1, "expert_dtype": "fp4", "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256,
}  # fmt: skip


def test_the_released_geometry_is_read_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    config = ModelConfig.from_json(tmp_path)
    assert len(config.compress_ratios) == 43
    assert config.extra_ratios == (0, 0, 0)
    assert (len(config.layers_of(4)), len(config.layers_of(128))) == (21, 20)
    assert config.nope_dim == 448
    assert config.dspark is not None
    assert config.dspark.target_layer_ids == (40, 41, 42)
    assert config.yarn is not None
    assert config.yarn.factor == 16.0


@pytest.mark.parametrize("name", [name for name in FLASH if name not in (
    "scoring_func", "topk_method", "norm_topk_prob", "hidden_act", "num_key_value_heads", "expert_dtype",
    "rope_scaling", "dspark_block_size",
)])  # fmt: skip
def test_a_missing_field_is_named(name):
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_dict({key: value for key, value in FLASH.items() if key != name})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "deepseek_v41"}, "deepseek_v41"),
        ({"compress_ratios": [0, 4]}, "compress_ratios"),
        ({"compress_ratios": [2] * 43}, "compress_ratios"),
        ({"o_groups": 7}, "o_groups"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 63}, "odd"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"dspark_target_layer_ids": [43]}, "dspark_target_layer_ids"),
        ({"num_hash_layers": True}, "num_hash_layers"),
    ],
)
def test_a_contradiction_is_refused_by_name(changes, word):
    with pytest.raises(ConfigError, match=word):
        ModelConfig.from_dict({**FLASH, **changes})


def test_a_drafts_optional_fields_have_the_releases_defaults_and_are_read():
    plain = ModelConfig.from_dict(FLASH).dspark
    assert plain is not None
    assert plain.markov_head_type == "vanilla"
    assert (plain.has_confidence, plain.confidence_with_markov) == (True, True)
    assert (plain.n_routed_experts, plain.num_experts_per_tok) == (0, 0)
    assert plain.sts_temperatures == (1.0,) * 5
    named = {
        "dspark_markov_head_type": "rnn", "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
        "enable_confidence_head": False, "confidence_head_with_markov": False,
        "dspark_sts_temperatures": [1, 2.5, 0.5, 1.5, 3],
    }  # fmt: skip
    other = ModelConfig.from_dict({**FLASH, **named}).dspark
    assert other is not None
    assert other.markov_head_type == "rnn"
    assert (other.has_confidence, other.confidence_with_markov) == (False, False)
    assert (other.n_routed_experts, other.num_experts_per_tok) == (128, 3)
    assert other.sts_temperatures == (1.0, 2.5, 0.5, 1.5, 3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dspark_target_layer_ids": [40, 43]}, "layer 43 of a model of 43 layers"),
        ({"dspark_target_layer_ids": [40, -1]}, "layer -1 of a model of 43 layers"),
        ({"dspark_target_layer_ids": [40, 41, 40]}, "names a layer twice"),
        ({"dspark_target_layer_ids": []}, r"\[\], not a list of layers"),
        ({"dspark_noise_token_id": 129280}, "129280 is past 129280 embeddings"),
        ({"dspark_noise_token_id": -1}, "-1 is past 129280"),
        ({"dspark_block_size": 0}, "dspark_block_size is 0"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank is 0"),
        ({"dspark_markov_rank": "256"}, "dspark_markov_rank is '256'"),
        ({"dspark_markov_head_type": "crf"}, "'crf'; .*vanilla"),
        ({"dspark_sts_temperatures": [1.0] * 7}, "7 temperatures for dspark_block_size 5"),
        ({"dspark_sts_temperatures": [1.0, 1.0, 0.0, 1.0, 1.0]}, "not a list of positive numbers"),
        ({"enable_confidence_head": 1}, "enable_confidence_head is 1"),
    ],
)
def test_a_draft_that_doesnt_fit_its_target_is_refused_with_both_values(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**FLASH, **changes})


def test_an_unreadable_file_is_a_config_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_json(tmp_path)


def test_pools_hold_the_bytes_that_the_family_needs():
    """bf16 rows: 6,880 bytes of compressed rows a token at the released geometry."""
    config = ModelConfig.from_dict(FLASH)
    full = [spec for spec in pools(config) if spec.space == "full"]
    page = sum(spec.page_rows * spec.row_width * len(spec.layers) * 2 for spec in full)
    assert page / 256 == 6880
