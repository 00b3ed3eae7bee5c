"""Which tensors a DeepSeek-V4 checkpoint holds, with shapes and types, as its geometry and content say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from engine.errors import CheckpointError
from engine.model.config import C4, ModelConfig
from engine.model.quant import FP4_GROUP, FP8_BLOCK

FLOATS = ("BF16", "F32", "F16")
_MTP = re.compile(r"mtp\.(\d+)\.")


class Role(Enum):
    """What a tensor is to the loader.

    MATRIX  floating point, loaded in the wanted type
    FP32    floating point, loaded as float32 whatever the wanted type
    FP8     codes [O, I] with scales beside them, FP4  packed codes [O, I / 2] with scales beside them
    SCALE   e8m0 scales of the weight of the same name
    TABLE   expert ids by token id, loaded as int32
    """

    MATRIX = "matrix"
    FP32 = "fp32"
    FP8 = "fp8"
    FP4 = "fp4"
    SCALE = "scale"
    TABLE = "table"


class Storage(Enum):
    """How matrices are stored."""

    FLOAT = "float"
    FP8 = "fp8"
    FP4 = "fp4"


class Draft(Enum):
    """What `mtp.*` holds."""

    NONE = "none"
    CLASSIC = "classic"
    DSPARK = "dspark"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor: its shape in the file, the safetensors types it may have, and its role."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: Role

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape after unpacking; differs from `shape` for FP4."""
        if self.role is Role.FP4:
            return (*self.shape[:-1], 2 * self.shape[-1])
        return self.shape


@dataclass(frozen=True, slots=True)
class Layout:
    """What a checkpoint's content decides: storage of dense and expert matrices; kind and count of drafts."""

    dense: Storage
    experts: Storage
    draft: Draft
    stages: int


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
        "norm.weight": _fp32(width),
        **_head_mixing(config, ""),
    }
    for layer, ratio in enumerate(config.compress_ratios):
        tensors |= _block(config, layout, f"layers.{layer}.", ratio, layer < config.num_hash_layers)
    for stage in range(layout.stages):
        tensors |= _block(config, layout, f"mtp.{stage}.", 0, False)
    if layout.draft is Draft.CLASSIC:
        for stage in range(layout.stages):
            tensors |= _classic_extras(config, layout, f"mtp.{stage}.")
    if layout.draft is Draft.DSPARK:
        tensors |= _dspark_extras(config, layout)
    return tensors


def scale_name(weight: str) -> str:
    """Name of the scales of a quantised weight."""
    return weight.removesuffix(".weight") + ".scale"


def _storage(dtype: str) -> Storage:
    return {"F8_E4M3": Storage.FP8, "I8": Storage.FP4, "U8": Storage.FP4}.get(dtype, Storage.FLOAT)


def _fp32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, FLOATS, Role.FP32)


def _matrix(name: str, storage: Storage, rows: int, columns: int) -> dict[str, TensorSpec]:
    """One matrix [rows, columns], with its scales where it is quantised. raises CheckpointError."""
    if storage is Storage.FLOAT:
        return {name: TensorSpec((rows, columns), FLOATS, Role.MATRIX)}
    if storage is Storage.FP8:
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        weight = TensorSpec((rows, columns), ("F8_E4M3",), Role.FP8)
        return {name: weight, scale_name(name): TensorSpec(blocks, ("F8_E8M0", "U8"), Role.SCALE)}
    if columns % FP4_GROUP:
        raise CheckpointError(f"{name}: {columns} columns don't divide into FP4 groups of {FP4_GROUP}")
    weight = TensorSpec((rows, columns // 2), ("I8", "U8"), Role.FP4)
    scale = TensorSpec((rows, columns // FP4_GROUP), ("F8_E8M0", "U8"), Role.SCALE)
    return {name: weight, scale_name(name): scale}


def _block(config: ModelConfig, layout: Layout, at: str, ratio: int, hashed: bool) -> dict[str, TensorSpec]:
    """A layer or draft stage: attention, experts, two stream-mixing sets, two norms."""
    width = config.hidden_size
    tensors = {f"{at}attn_norm.weight": _fp32(width), f"{at}ffn_norm.weight": _fp32(width)}
    streams = config.hc_mult
    for part in ("attn", "ffn"):
        rows = (2 + streams) * streams
        tensors[f"{at}hc_{part}_fn"] = _fp32(rows, streams * width)
        tensors[f"{at}hc_{part}_base"] = _fp32(rows)
        tensors[f"{at}hc_{part}_scale"] = _fp32(3)
    return (
        tensors
        | _attention(config, layout, f"{at}attn.", ratio)
        | _experts(config, layout, f"{at}ffn.", hashed)
    )


def _attention(config: ModelConfig, layout: Layout, at: str, ratio: int) -> dict[str, TensorSpec]:
    heads, wide, lora = config.num_attention_heads, config.head_dim, config.q_lora_rank
    out_rank = config.o_groups * config.o_lora_rank
    tensors = {
        f"{at}q_norm.weight": _fp32(lora),
        f"{at}kv_norm.weight": _fp32(wide),
        f"{at}attn_sink": _fp32(heads),
    }
    for name, rows, columns in (
        ("wq_a", lora, config.hidden_size),
        ("wq_b", heads * wide, lora),
        ("wkv", wide, config.hidden_size),
        ("wo_a", out_rank, config.head_group_width),
        ("wo_b", config.hidden_size, out_rank),
    ):
        tensors |= _matrix(f"{at}{name}.weight", layout.dense, rows, columns)
    if ratio:
        tensors |= _compressor(config, f"{at}compressor.", ratio, wide)
    if ratio == C4:
        index_heads, index_wide = config.index_n_heads, config.index_head_dim
        tensors |= _matrix(f"{at}indexer.wq_b.weight", layout.dense, index_heads * index_wide, lora)
        proj = TensorSpec((index_heads, config.hidden_size), FLOATS, Role.MATRIX)
        tensors[f"{at}indexer.weights_proj.weight"] = proj
        tensors |= _compressor(config, f"{at}indexer.compressor.", ratio, index_wide)
    return tensors


def _compressor(config: ModelConfig, at: str, ratio: int, wide: int) -> dict[str, TensorSpec]:
    channels = wide * (2 if ratio == C4 else 1)
    tensors = {f"{at}ape": _fp32(ratio, channels), f"{at}norm.weight": _fp32(wide)}
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
        tensors[f"{at}gate.bias"] = _fp32(experts)
    groups = [(f"{at}experts.{expert}.", layout.experts, inner) for expert in range(experts)]
    if config.n_shared_experts:
        groups.append((f"{at}shared_experts.", layout.dense, inner * config.n_shared_experts))
    for prefix, storage, rows in groups:
        tensors |= _matrix(f"{prefix}w1.weight", storage, rows, width)
        tensors |= _matrix(f"{prefix}w3.weight", storage, rows, width)
        tensors |= _matrix(f"{prefix}w2.weight", storage, width, rows)
    return tensors


def _head_mixing(config: ModelConfig, at: str) -> dict[str, TensorSpec]:
    streams = config.hc_mult
    return {
        f"{at}hc_head_fn": _fp32(streams, streams * config.hidden_size),
        f"{at}hc_head_base": _fp32(streams),
        f"{at}hc_head_scale": _fp32(1),
    }


def _classic_extras(config: ModelConfig, layout: Layout, at: str) -> dict[str, TensorSpec]:
    width = config.hidden_size
    tensors = _head_mixing(config, at)
    for name in ("e_proj", "h_proj"):
        tensors |= _matrix(f"{at}{name}.weight", layout.dense, width, width)
    return tensors | {f"{at}{name}.weight": _fp32(width) for name in ("enorm", "hnorm", "norm")}


def _dspark_extras(config: ModelConfig, layout: Layout) -> dict[str, TensorSpec]:
    if config.dspark is None:
        raise CheckpointError("DSpark stages need the dspark_* fields of config.json")
    width, rank = config.hidden_size, config.dspark.markov_rank
    taps = len(config.dspark.target_layer_ids)
    last = f"mtp.{layout.stages - 1}."
    tensors = _matrix("mtp.0.main_proj.weight", layout.dense, width, taps * width)
    tensors |= {"mtp.0.main_norm.weight": _fp32(width), f"{last}norm.weight": _fp32(width)}
    tensors |= _head_mixing(config, last)
    for name in ("markov_w1", "markov_w2"):
        shape = (config.vocab_size, rank)
        tensors[f"{last}markov_head.{name}.weight"] = TensorSpec(shape, FLOATS, Role.MATRIX)
    proj = TensorSpec((1, width + rank), FLOATS, Role.MATRIX)
    return tensors | {f"{last}confidence_head.proj.weight": proj}
