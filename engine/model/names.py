"""Tensor names of DeepSeek's checkpoints and of the transformers library; from the second to the first."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from engine.errors import CheckpointError

_ATTENTION = {
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "kv_norm": "kv_norm",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
}
_COMPRESSOR = {
    "kv_proj.weight": "wkv.weight",
    "gate_proj.weight": "wgate.weight",
    "position_bias": "ape",
    "kv_norm.weight": "norm.weight",
}
_SHARED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def _layer_names() -> dict[str, str]:
    """Names below `layers.L.` whose tensor is the same in both layouts, transformers -> DeepSeek."""
    names = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
    }
    for block in ("attn", "ffn"):
        names.update({f"{block}_hc.{part}": f"hc_{block}_{part}" for part in ("fn", "base", "scale")})
    names.update({f"self_attn.{own}.weight": f"attn.{other}.weight" for own, other in _ATTENTION.items()})
    names["self_attn.sinks"] = "attn.attn_sink"
    for own, other in _COMPRESSOR.items():
        names[f"self_attn.compressor.{own}"] = f"attn.compressor.{other}"
        names[f"self_attn.compressor.indexer.{own}"] = f"attn.indexer.compressor.{other}"
    names["self_attn.compressor.indexer.q_b_proj.weight"] = "attn.indexer.wq_b.weight"
    names["self_attn.compressor.indexer.scorer.weights_proj.weight"] = "attn.indexer.weights_proj.weight"
    names["mlp.gate.weight"] = "ffn.gate.weight"
    names["mlp.gate.e_score_correction_bias"] = "ffn.gate.bias"
    names["mlp.gate.tid2eid"] = "ffn.gate.tid2eid"
    for own, other in _SHARED.items():
        names[f"mlp.shared_experts.{own}.weight"] = f"ffn.shared_experts.{other}.weight"
    return names


_PER_LAYER = _layer_names()


def is_transformers(names: set[str]) -> bool:
    """Whether a checkpoint's tensor names are of the transformers library."""
    return "model.embed_tokens.weight" in names


def deepseek_name(name: str) -> str | None:
    """DeepSeek's name of a tensor that is the same in both layouts; None for fused expert tensors and
    buffers.

    name  transformers' name
    """
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    if match and match[2] in _PER_LAYER:
        return f"layers.{match[1]}.{_PER_LAYER[match[2]]}"
    return None


def from_transformers(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transformers state dict under DeepSeek's names; experts are split, nothing is copied.

    raises  CheckpointError for a name that no table knows
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        plain = deepseek_name(name)
        if plain is not None:
            out[plain] = tensor
        elif match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", name):
            out.update(_split_experts(f"layers.{match[1]}.ffn.experts", match[2], tensor))
        elif not name.endswith("inv_freq"):
            raise CheckpointError(f"tensor {name!r} has no place in DeepSeek's layout")
    return out


def _split_experts(prefix: str, kind: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of one expert each. `stacked` is [E, 2I, H] (gate rows, then up rows) or [E, H, I]."""
    out: dict[str, torch.Tensor] = {}
    for expert, tensor in enumerate(stacked):
        if kind == "down_proj":
            out[f"{prefix}.{expert}.w2.weight"] = tensor
        else:
            half = tensor.shape[0] // 2
            out[f"{prefix}.{expert}.w1.weight"] = tensor[:half]
            out[f"{prefix}.{expert}.w3.weight"] = tensor[half:]
    return out
