"""The tiny DeepSeek-V4 of the golden tests, and transformers' model with no parameter left trivial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from engine.model.config import ModelConfig
from engine.model.names import from_transformers

FIELDS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 4,
    "o_lora_rank": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "sliding_window": 32,
    # Fewer index heads give exact ties at the selection's edge, which both codes may break either way.
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
}
YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256}


def deepseek_fields(**changes: Any) -> dict[str, Any]:
    """The configuration as DeepSeek's config.json spells it."""
    return {**FIELDS, "model_type": "deepseek_v4", "rope_scaling": {"type": "yarn", **YARN}, **changes}


def tiny_config(**changes: Any) -> ModelConfig:
    """The engine's configuration of the tiny model."""
    return ModelConfig.from_dict(deepseek_fields(**changes))


def reference_model(seed: int, **changes: Any) -> DeepseekV4ForCausalLM:
    """transformers' model in float32 with every parameter random, buffers included."""
    fields = {**FIELDS, **changes}
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config(**fields, rope_parameters={"rope_type": "yarn", **YARN})
    ).eval()
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor, scale: float) -> None:
        tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                experts, count = fields["n_routed_experts"], tensor.shape[1]
                tensor.copy_(torch.rand(tensor.shape[0], experts, generator=generator).topk(count).indices)
            elif name.endswith(("sinks", "position_bias", "e_score_correction_bias")):
                noise(tensor, 0.5)
            elif name.endswith(("base", "hc_scale", ".scale")) or "norm" in name:
                noise(tensor, 0.2)
            elif not name.endswith("inv_freq"):
                noise(tensor, 0.05)
    return model


def weights_of(model: DeepseekV4ForCausalLM) -> dict[str, Tensor]:
    """Its parameters and buffers under DeepSeek's names."""
    return from_transformers(model.state_dict())


def reference_logits(model: DeepseekV4ForCausalLM, tokens: list[int]) -> Tensor:
    """Logits of every position, [n, V], by one full forward."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def random_tokens(count: int, seed: int) -> list[int]:
    """`count` token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, FIELDS["vocab_size"], (count,), generator=generator).tolist()
