"""The config.json that the transformers library writes, in the fields that DeepSeek's own files use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError

_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def deepseek_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config.json with layer kinds as `compress_ratios` and rope as DeepSeek spells it.

    A file that has `compress_ratios` and flat rope fields comes back as it is.
    raises  ConfigError for a layer kind that isn't known, or a hash layer behind a routed one
    """
    out = dict(fields)
    kinds = fields.get("layer_types")
    if "compress_ratios" not in fields and isinstance(kinds, list):
        unknown = [kind for kind in kinds if kind not in _RATIOS]
        if unknown:
            raise ConfigError(f"config.json: layer_types holds {unknown[0]!r}; known are {sorted(_RATIOS)}")
        out["compress_ratios"] = [_RATIOS[kind] for kind in kinds]
    mlps = fields.get("mlp_layer_types")
    if "num_hash_layers" not in fields and isinstance(mlps, list):
        hashed = mlps.count("hash_moe")
        if mlps[:hashed] != ["hash_moe"] * hashed:
            raise ConfigError("config.json: mlp_layer_types has a hash_moe layer behind a routed one")
        out["num_hash_layers"] = hashed
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping) and isinstance(rope.get("compress"), Mapping):
        compress = rope["compress"]
        out["rope_scaling"] = {**compress, "type": compress.get("rope_type", "default")}
        out.setdefault("compress_rope_theta", compress.get("rope_theta"))
        if isinstance(rope.get("main"), Mapping):
            out.setdefault("rope_theta", rope["main"].get("rope_theta"))
    return out
