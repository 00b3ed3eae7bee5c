"""The expected layout reproduces the tensor and byte counts of the released checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.layout import expected_tensors, sniff_layout
from engine.model.tensor_specs import Draft, Layout, Role, Storage

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}


@pytest.fixture(scope="module")
def flash(fields: dict[str, Any]) -> ModelConfig:
    """DeepSeek-V4-Flash-0731's geometry."""
    ratios = [0, 0] + [4, 128] * 20 + [4] + [0, 0, 0]
    return ModelConfig.from_dict(
        fields
        | {
            "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
            "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
            "compress_ratios": ratios, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
            "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
            "num_hash_layers": 3, "max_position_embeddings": 1048576, "dspark_block_size": 5,
            "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42],
            "dspark_markov_rank": 256,
        }
    )  # fmt: skip


def test_flash_with_its_draft_has_the_released_number_of_tensors_and_bytes(flash: ModelConfig) -> None:
    specs = expected_tensors(flash, Layout(Storage.FP8, Storage.FP4, Draft.DSPARK, 3))
    assert len(specs) == 72_317
    total = 0
    for name, spec in specs.items():
        dtype = spec.dtypes[0]
        # Matrices that aren't quantised and norms are bf16 in the releases; the other parameters are float32.
        if spec.role is Role.FP32 and not name.endswith("norm.weight"):
            dtype = "F32"
        total += math.prod(spec.shape) * BYTES[dtype]
    assert total == 166_878_536_440


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.2.attn.wo_a.weight", (8192, 4096)),
        ("layers.2.attn.wo_a.scale", (64, 32)),
        ("layers.2.attn.compressor.ape", (4, 1024)),
        ("layers.3.attn.compressor.ape", (128, 512)),
        ("layers.42.attn.indexer.compressor.wkv.weight", (256, 4096)),
        ("layers.7.ffn.experts.255.w2.weight", (4096, 1024)),
        ("layers.7.ffn.experts.255.w2.scale", (4096, 64)),
        ("layers.2.ffn.gate.tid2eid", (129280, 6)),
        ("layers.5.hc_ffn_fn", (24, 16384)),
        ("mtp.0.main_proj.scale", (32, 96)),
        ("mtp.2.markov_head.markov_w2.weight", (129280, 256)),
        ("mtp.2.confidence_head.proj.weight", (1, 4352)),
    ],
)
def test_flash_shapes_are_those_of_the_release(flash: ModelConfig, name: str, shape: tuple[int, ...]) -> None:
    specs = expected_tensors(flash, Layout(Storage.FP8, Storage.FP4, Draft.DSPARK, 3))
    assert specs[name].shape == shape


def test_fp8_experts_are_recognised_by_their_type_not_by_the_configuration(flash: ModelConfig) -> None:
    types = {"layers.0.ffn.experts.0.w1.weight": "F8_E4M3", "layers.0.attn.wq_a.weight": "F8_E4M3"}
    layout = sniff_layout(flash, types)
    assert (layout.dense, layout.experts) == (Storage.FP8, Storage.FP8)
    specs = expected_tensors(flash, layout)
    assert specs["layers.0.ffn.experts.9.w2.scale"].shape == (32, 16)


def test_an_unknown_draft_is_refused(flash: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match="neither e_proj"):
        sniff_layout(flash, {"mtp.0.attn.wq_a.weight": "F8_E4M3"})


def test_widths_that_cut_an_fp4_group_are_refused(fields: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(fields | {"moe_intermediate_size": 240})
    with pytest.raises(CheckpointError, match="240 columns don't divide into FP4 groups"):
        expected_tensors(config, Layout(Storage.FP8, Storage.FP4, Draft.NONE, 0))
