"""Which tensors a DeepSeek-V4 checkpoint holds, with shapes and types, as its geometry and content say."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.errors import CheckpointError
from engine.model.config import C4, ModelConfig
from engine.model.draft_layout import classic_extras, draft_geometry, dspark_extras
from engine.model.tensor_specs import (
    FLOATS,
    Draft,
    Layout,
    Role,
    Storage,
    TensorSpec,
    fp32,
    head_mixing,
    matrix,
)

_MTP = re.compile(r"mtp\.(\d+)\.")


DEEPSEEK_LAYOUT = Layout(Storage.FP8, Storage.FP4, Draft.NONE, 0)
FLOAT_LAYOUT = Layout(Storage.FLOAT, Storage.FLOAT, Draft.NONE, 0)


def sniff_layout(config: ModelConfig, dtypes: Mapping[str, str]) -> Layout:
    """The layout that a checkpoint's tensor names and types show.

    dtypes  safetensors type by DeepSeek name; config.expert_dtype is not consulted, as releases differ
    raises  CheckpointError where `mtp.*` is of no known kind, or config.json lacks the fields it needs
    """
    stages = {int(match[1]) for name in dtypes if (match := _MTP.match(name))}
    draft = Draft.NONE
    if stages and "mtp.0.e_proj.weight" in dtypes:
        draft = Draft.CLASSIC
    elif stages and "mtp.0.main_proj.weight" in dtypes:
        draft = Draft.DSPARK
        if config.dspark is None:
            raise CheckpointError(
                "mtp.0.main_proj.weight shows DSpark stages, config.json has no dspark_* fields"
            )
    elif stages:
        raise CheckpointError("mtp.0 has neither e_proj.weight (classic MTP) nor main_proj.weight (DSpark)")
    return Layout(
        dense=_storage(dtypes.get("layers.0.attn.wq_a.weight", "F8_E4M3")),
        experts=_storage(dtypes.get("layers.0.ffn.experts.0.w1.weight", "I8")),
        draft=draft,
        stages=len(stages),
    )


def expected_tensors(config: ModelConfig, layout: Layout) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this geometry and layout holds, by DeepSeek's names."""
    width = config.hidden_size
    tensors = {
        "embed.weight": TensorSpec((config.vocab_size, width), FLOATS, Role.MATRIX),
        "head.weight": TensorSpec((config.vocab_size, width), FLOATS, Role.MATRIX),
        "norm.weight": fp32(width),
        **head_mixing(config, ""),
    }
    for layer, ratio in enumerate(config.compress_ratios):
        tensors |= _block(config, layout, f"layers.{layer}.", ratio, layer < config.num_hash_layers)
    for stage in range(layout.stages):
        tensors |= _block(draft_geometry(config), layout, f"mtp.{stage}.", 0, False)
    if layout.draft is Draft.CLASSIC:
        for stage in range(layout.stages):
            tensors |= classic_extras(config, layout, f"mtp.{stage}.")
    if layout.draft is Draft.DSPARK:
        tensors |= dspark_extras(config, layout)
    return tensors


def _storage(dtype: str) -> Storage:
    return {"F8_E4M3": Storage.FP8, "I8": Storage.FP4, "U8": Storage.FP4}.get(dtype, Storage.FLOAT)


def _block(config: ModelConfig, layout: Layout, at: str, ratio: int, hashed: bool) -> dict[str, TensorSpec]:
    """A layer or draft stage: attention, experts, two stream-mixing sets, two norms."""
    width = config.hidden_size
    tensors = {f"{at}attn_norm.weight": fp32(width), f"{at}ffn_norm.weight": fp32(width)}
    streams = config.hc_mult
    for part in ("attn", "ffn"):
        rows = (2 + streams) * streams
        tensors[f"{at}hc_{part}_fn"] = fp32(rows, streams * width)
        tensors[f"{at}hc_{part}_base"] = fp32(rows)
        tensors[f"{at}hc_{part}_scale"] = fp32(3)
    return (
        tensors
        | _attention(config, layout, f"{at}attn.", ratio)
        | _experts(config, layout, f"{at}ffn.", hashed)
    )


def _attention(config: ModelConfig, layout: Layout, at: str, ratio: int) -> dict[str, TensorSpec]:
    heads, wide, lora = config.num_attention_heads, config.head_dim, config.q_lora_rank
    out_rank = config.o_groups * config.o_lora_rank
    tensors = {
        f"{at}q_norm.weight": fp32(lora),
        f"{at}kv_norm.weight": fp32(wide),
        f"{at}attn_sink": fp32(heads),
    }
    for name, rows, columns in (
        ("wq_a", lora, config.hidden_size),
        ("wq_b", heads * wide, lora),
        ("wkv", wide, config.hidden_size),
        ("wo_a", out_rank, config.head_group_width),
        ("wo_b", config.hidden_size, out_rank),
    ):
        tensors |= matrix(f"{at}{name}.weight", layout.dense, rows, columns)
    if ratio:
        tensors |= _compressor(config, f"{at}compressor.", ratio, wide)
    if ratio == C4:
        index_heads, index_wide = config.index_n_heads, config.index_head_dim
        tensors |= matrix(f"{at}indexer.wq_b.weight", layout.dense, index_heads * index_wide, lora)
        proj = TensorSpec((index_heads, config.hidden_size), FLOATS, Role.MATRIX)
        tensors[f"{at}indexer.weights_proj.weight"] = proj
        tensors |= _compressor(config, f"{at}indexer.compressor.", ratio, index_wide)
    return tensors


def _compressor(config: ModelConfig, at: str, ratio: int, wide: int) -> dict[str, TensorSpec]:
    channels = wide * (2 if ratio == C4 else 1)
    tensors = {f"{at}ape": fp32(ratio, channels), f"{at}norm.weight": fp32(wide)}
    for name in ("wkv", "wgate"):
        tensors[f"{at}{name}.weight"] = TensorSpec((channels, config.hidden_size), FLOATS, Role.MATRIX)
    return tensors


def _experts(config: ModelConfig, layout: Layout, at: str, hashed: bool) -> dict[str, TensorSpec]:
    width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    tensors = {f"{at}gate.weight": TensorSpec((experts, width), FLOATS, Role.MATRIX)}
    if hashed:
        shape = (config.vocab_size, config.num_experts_per_tok)
        tensors[f"{at}gate.tid2eid"] = TensorSpec(shape, ("I64", "I32"), Role.TABLE)
    else:
        tensors[f"{at}gate.bias"] = fp32(experts)
    groups = [(f"{at}experts.{expert}.", layout.experts, inner) for expert in range(experts)]
    if config.n_shared_experts:
        groups.append((f"{at}shared_experts.", layout.dense, inner * config.n_shared_experts))
    for prefix, storage, rows in groups:
        tensors |= matrix(f"{prefix}w1.weight", storage, rows, width)
        tensors |= matrix(f"{prefix}w3.weight", storage, rows, width)
        tensors |= matrix(f"{prefix}w2.weight", storage, width, rows)
    return tensors
