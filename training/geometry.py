"""Shape of the shipped model, as numbers and as DeepSeek's config.json."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Geometry:
    """A DeepSeek-V4 shape; the defaults are the shipped model's.

    Every width is a multiple of 128, so that each FP8 and FP4 block divides. `compress_ratios` has one
    entry a layer; config.json appends three zeros, the places of the draft stages.
    """

    vocab_size: int = 8192
    hidden_size: int = 256
    num_heads: int = 4
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    num_experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 256
    compress_ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 128, 4, 128)
    num_hash_layers: int = 3
    sliding_window: int = 128
    index_heads: int = 16
    index_head_dim: int = 128
    index_topk: int = 64
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    # Trained on rows of 2,048; YaRN stretches the slow frequencies to four times that, at every length.
    yarn_factor: float = 4.0
    yarn_original_positions: int = 2048
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    @property
    def num_layers(self) -> int:
        """Backbone layers."""
        return len(self.compress_ratios)

    @property
    def max_positions(self) -> int:
        """Longest context that config.json announces."""
        return int(self.yarn_factor * self.yarn_original_positions)

    def frequencies(self, compressed: bool) -> list[float]:
        """Radians a position of each channel pair; `compressed` layers use the other base and YaRN."""
        pairs = self.rope_dim // 2
        theta = self.compress_rope_theta if compressed else self.rope_theta
        plain = [theta ** (-2 * i / self.rope_dim) for i in range(pairs)]
        if not compressed:
            return plain
        low = max(math.floor(self._yarn_pair(self.yarn_beta_fast)), 0)
        high = min(math.ceil(self._yarn_pair(self.yarn_beta_slow)), self.rope_dim - 1)
        ramp = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(pairs)]
        return [f / self.yarn_factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    def _yarn_pair(self, rotations: float) -> float:
        """Channel pair that turns `rotations` times over the original context."""
        turns = self.yarn_original_positions / (rotations * 2 * math.pi)
        return self.rope_dim * math.log(turns) / (2 * math.log(self.compress_rope_theta))


def config_json(geometry: Geometry, bos_id: int, eos_id: int) -> dict[str, object]:
    """config.json of the exported checkpoint, with the key names of the released models."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "compress_ratios": [*geometry.compress_ratios, 0, 0, 0],
        "compress_rope_theta": geometry.compress_rope_theta,
        "expert_dtype": "fp4",
        "hc_eps": geometry.hc_eps,
        "hc_mult": geometry.hc_mult,
        "hc_sinkhorn_iters": geometry.hc_sinkhorn_iters,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "index_head_dim": geometry.index_head_dim,
        "index_n_heads": geometry.index_heads,
        "index_topk": geometry.index_topk,
        "max_position_embeddings": geometry.max_positions,
        "moe_intermediate_size": geometry.expert_width,
        "n_routed_experts": geometry.num_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": geometry.num_heads,
        "num_experts_per_tok": geometry.experts_per_token,
        "num_hash_layers": geometry.num_hash_layers,
        "num_hidden_layers": geometry.num_layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": geometry.o_groups,
        "o_lora_rank": geometry.o_lora_rank,
        "q_lora_rank": geometry.q_lora_rank,
        "qk_rope_head_dim": geometry.rope_dim,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": geometry.rms_norm_eps,
        "rope_scaling": {
            "beta_fast": geometry.yarn_beta_fast,
            "beta_slow": geometry.yarn_beta_slow,
            "factor": geometry.yarn_factor,
            "original_max_position_embeddings": geometry.yarn_original_positions,
            "type": "yarn",
        },
        "rope_theta": geometry.rope_theta,
        "routed_scaling_factor": geometry.routed_scaling_factor,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": geometry.sliding_window,
        "swiglu_limit": geometry.swiglu_limit,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": geometry.vocab_size,
    }
