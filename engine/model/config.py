"""The geometry of one DeepSeek-V4 checkpoint, read from its config.json and checked first of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError
from engine.model.fields import (
    DSparkConfig,
    Yarn,
    check_dspark,
    check_family,
    read_dspark,
    read_field,
    read_ratios,
    read_yarn,
)
from engine.model.row_layout import RowLayout
from engine.model.transformers_config import deepseek_fields

PAGE_TOKENS = 256
C4, C128 = 4, 128

KVFormat = Literal["model", "fp8"]
"""What caches hold: values of the model's type, or FP8 rows of latents and FP8 index keys."""

VALUE_BYTES = {"float32": 4, "uint8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class PoolSpec:
    """One cache of a model family: what memory, tiers and transfers need to know of it.

    name       unique in the family
    space      "full" or "window" page ids, or "slot" for per-request state
    page_rows  rows of one 256-token page ("slot": rows of one request slot)
    row_width  values in a row
    layers     backbone layers that own one, ascending
    dtype      torch's name of the values' type, one of VALUE_BYTES; empty: the model's own
    """

    name: str
    space: str
    page_rows: int
    row_width: int
    layers: tuple[int, ...]
    dtype: str = ""

    def unit_bytes(self, value_bytes: int) -> int:
        """Bytes of one page or slot over all layers; value_bytes: of a value of the model's type."""
        value = VALUE_BYTES[self.dtype] if self.dtype else value_bytes
        return self.page_rows * self.row_width * len(self.layers) * value


@dataclass(frozen=True)
class ModelConfig:
    """All fields of a DeepSeek-V4 config.json that change the computation. Names are the file's.

    compress_ratios  one entry a backbone layer (0, 4 or 128)
    extra_ratios     entries past the backbone: MTP or DSpark stages
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    extra_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    num_nextn_predict_layers: int
    expert_dtype: str | None
    dspark: DSparkConfig | None

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Reads a config.json, or the one in a checkpoint folder.

        raises  ConfigError where the file can't be read, a field is missing, or two fields contradict
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: not a readable JSON file: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{file}: holds a {type(fields).__name__}, not an object")
        return cls.from_dict(deepseek_fields(fields))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """The configuration in a parsed config.json. raises ConfigError, naming the field."""
        check_family(fields)
        layers = read_field(fields, "num_hidden_layers", int)
        ratios = read_ratios(fields, layers)
        config = cls(
            compress_ratios=ratios[:layers],
            extra_ratios=ratios[layers:],
            yarn=read_yarn(fields.get("rope_scaling") or fields.get("rope_parameters")),
            expert_dtype=fields.get("expert_dtype"),
            dspark=read_dspark(fields),
            **{name: read_field(fields, name, kind) for name, kind in _PLAIN_FIELDS.items()},
        )
        _check(config)
        return config

    @property
    def nope_dim(self) -> int:
        """Channels of a head that carry no rotation; they come first."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def head_group_width(self) -> int:
        """Input width of one group of the output projection."""
        return self.num_attention_heads // self.o_groups * self.head_dim

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Backbone layers whose compress ratio is `ratio`."""
        return tuple(i for i, own in enumerate(self.compress_ratios) if own == ratio)


def pools(config: ModelConfig, kv: KVFormat = "model") -> tuple[PoolSpec, ...]:
    """Every cache of the family, in the order in which pages are written and transferred.

    raises  ShapeMismatch where kv is fp8 and heads have no such rows
    """
    every = tuple(range(config.num_hidden_layers))
    c4, c128 = config.layers_of(C4), config.layers_of(C128)
    wide, index = config.head_dim, config.index_head_dim
    row, latent, key = wide, "", ""
    if kv == "fp8":
        row = RowLayout(config.nope_dim, config.qk_rope_head_dim).row_bytes
        latent, key = "uint8", "float8_e4m3fn"
    specs = [
        PoolSpec("window", "window", PAGE_TOKENS, row, every, latent),
        PoolSpec("c4", "full", PAGE_TOKENS // C4, row, c4, latent),
        PoolSpec("index", "full", PAGE_TOKENS // C4, index, c4, key),
        PoolSpec("c128", "full", PAGE_TOKENS // C128, row, c128, latent),
        PoolSpec("c4_ring", "slot", 2 * C4, 4 * (wide + index), c4, "float32"),
        PoolSpec("c128_state", "slot", 3, wide, c128, "float32"),
    ]
    if kv == "fp8":
        specs.insert(3, PoolSpec("index_scales", "full", PAGE_TOKENS // C4, 1, c4, "float32"))
    return tuple(specs)


_PLAIN_FIELDS: dict[str, type] = {
    "vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int,
    "head_dim": int, "qk_rope_head_dim": int, "q_lora_rank": int, "o_groups": int, "o_lora_rank": int,
    "sliding_window": int, "rope_theta": float, "compress_rope_theta": float,
    "max_position_embeddings": int, "index_n_heads": int, "index_head_dim": int, "index_topk": int,
    "n_routed_experts": int, "num_experts_per_tok": int, "n_shared_experts": int,
    "moe_intermediate_size": int, "num_hash_layers": int, "routed_scaling_factor": float,
    "swiglu_limit": float, "hc_mult": int, "hc_sinkhorn_iters": int, "hc_eps": float,
    "rms_norm_eps": float, "bos_token_id": int, "eos_token_id": int, "num_nextn_predict_layers": int,
}  # fmt: skip


def _check(config: ModelConfig) -> None:
    """raises ConfigError where two fields contradict."""
    for name, kind in _PLAIN_FIELDS.items():
        value = getattr(config, name)
        if kind is int and value < (0 if name in _MAY_BE_ZERO else 1):
            raise ConfigError(f"config.json: {name} is {value}, below its least value")
    for smaller, larger in _AT_MOST:
        if getattr(config, smaller) > getattr(config, larger):
            low, high = getattr(config, smaller), getattr(config, larger)
            raise ConfigError(f"config.json: {smaller} {low} exceeds {larger} {high}")
    if config.qk_rope_head_dim % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim {config.qk_rope_head_dim} is odd")
    if config.num_attention_heads % config.o_groups:
        raise ConfigError(
            f"config.json: {config.num_attention_heads} heads don't divide into o_groups {config.o_groups}"
        )
    if config.sliding_window > 128:
        raise ConfigError(f"config.json: sliding_window {config.sliding_window} exceeds 128, half a page")
    if config.dspark:
        check_dspark(config.dspark, config.num_hidden_layers, config.vocab_size)


_MAY_BE_ZERO = {
    "num_hash_layers",
    "n_shared_experts",
    "num_nextn_predict_layers",
    "bos_token_id",
    "eos_token_id",
}
_AT_MOST = (
    ("qk_rope_head_dim", "head_dim"),
    ("qk_rope_head_dim", "index_head_dim"),
    ("num_experts_per_tok", "n_routed_experts"),
    ("num_hash_layers", "num_hidden_layers"),
)


def eos_of(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """End tokens: those of generation_config.json where it names some, else the configuration's one."""
    file = folder / "generation_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ids = [config.eos_token_id] if named is None else named if isinstance(named, list) else [named]
    if not all(isinstance(token, int) and 0 <= token < config.vocab_size for token in ids):
        raise ConfigError(
            f"{file}: eos_token_id is {named!r}, but the vocabulary has {config.vocab_size} tokens"
        )
    return tuple(ids)
