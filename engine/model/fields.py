"""Reads the fields of a DeepSeek config.json; what is missing or unknown is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from engine.errors import ConfigError

RATIOS = (0, 4, 128)

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of the compressed layers' rotary frequencies; cos and sin are never scaled."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class DSparkConfig:
    """Draft geometry of a checkpoint that carries DSpark stages in `mtp.*`."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


_FIXED_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
}


def check_family(fields: Mapping[str, Any]) -> None:
    """raises ConfigError for another model family, or a variant of this one that isn't implemented."""
    if fields.get("model_type") != "deepseek_v4":
        raise ConfigError(
            f"config.json: model_type is {fields.get('model_type')!r}; only deepseek_v4 is known"
        )
    for name, allowed in _FIXED_FIELDS.items():
        if fields.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"config.json: {name} is {fields[name]!r}; only {allowed[0]!r} is implemented")


def read_field(fields: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Field `name` as `kind`; an int serves for a float. raises ConfigError."""
    if name not in fields:
        raise ConfigError(f"config.json: field {name!r} is missing")
    value = fields[name]
    right = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not right or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"config.json: {name} is {value!r}, not of type {kind.__name__}")
    return kind(value)


def read_ratios(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """`compress_ratios`, at least one entry a backbone layer. raises ConfigError."""
    ratios = fields.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers:
        held = len(ratios) if isinstance(ratios, list) else "no"
        raise ConfigError(f"config.json: compress_ratios holds {held} entries for {layers} layers")
    wrong = [ratio for ratio in ratios if ratio not in RATIOS]
    if wrong:
        raise ConfigError(f"config.json: compress_ratios holds {wrong[0]!r}; only 0, 4 and 128 are known")
    return tuple(ratios)


def read_yarn(scaling: object) -> Yarn | None:
    """The `rope_scaling` object, None where frequencies are plain. raises ConfigError."""
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise ConfigError(f"config.json: rope_scaling is {scaling!r}, not an object")
    values = cast(dict[str, Any], scaling)
    kind = values.get("type", values.get("rope_type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling type {kind!r}; only yarn is implemented")
    return Yarn(
        read_field(values, "factor", float),
        read_field(values, "beta_fast", float),
        read_field(values, "beta_slow", float),
        read_field(values, "original_max_position_embeddings", int),
    )


def read_dspark(fields: Mapping[str, Any]) -> DSparkConfig | None:
    """The draft's geometry, None for a checkpoint without `dspark_*` fields. raises ConfigError."""
    if "dspark_block_size" not in fields:
        return None
    targets = fields.get("dspark_target_layer_ids")
    if not isinstance(targets, list) or not targets:
        raise ConfigError(f"config.json: dspark_target_layer_ids is {targets!r}, not a list of layers")
    return DSparkConfig(
        read_field(fields, "dspark_block_size", int),
        read_field(fields, "dspark_noise_token_id", int),
        tuple(targets),
        read_field(fields, "dspark_markov_rank", int),
    )
