"""Reads the fields of a DeepSeek config.json; what is missing or unknown is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from engine.errors import ConfigError

RATIOS = (0, 4, 128)
MARKOV_HEADS = ("vanilla", "gated", "rnn")

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
    """Draft geometry of a checkpoint that carries DSpark stages in `mtp.*`. The number of stages isn't in it.

    target_layer_ids      layers whose outputs are tapped, in the order in which they are concatenated
    markov_head_type      "vanilla", "gated" or "rnn"
    n_routed_experts, num_experts_per_tok  of a stage, where they differ from the backbone's: else 0
    confidence_with_markov  the confidence head sees the Markov embedding too
    sts_temperatures      divisors of the confidence logits, one a position
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    markov_head_type: str
    n_routed_experts: int
    num_experts_per_tok: int
    has_confidence: bool
    confidence_with_markov: bool
    sts_temperatures: tuple[float, ...]


_DSPARK_DEFAULTS: dict[str, Any] = {
    "dspark_markov_head_type": "vanilla",
    "dspark_n_routed_experts": 0,
    "dspark_num_experts_per_tok": 0,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
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
    block = read_field(fields, "dspark_block_size", int)
    table = fields.get("dspark_sts_temperatures", [1.0] * block)
    if not isinstance(table, list) or not all(isinstance(t, int | float) and t > 0 for t in table):
        raise ConfigError(
            f"config.json: dspark_sts_temperatures is {table!r}, not a list of positive numbers"
        )
    optional = {name: value for name, value in _DSPARK_DEFAULTS.items() if name not in fields}
    known = {**fields, **optional}
    return DSparkConfig(
        block,
        read_field(fields, "dspark_noise_token_id", int),
        tuple(targets),
        read_field(fields, "dspark_markov_rank", int),
        read_field(known, "dspark_markov_head_type", str),
        read_field(known, "dspark_n_routed_experts", int),
        read_field(known, "dspark_num_experts_per_tok", int),
        read_field(known, "enable_confidence_head", bool),
        read_field(known, "confidence_head_with_markov", bool),
        tuple(float(t) for t in table),
    )


def check_dspark(dspark: DSparkConfig, layers: int, vocab_size: int) -> None:
    """raises ConfigError where the draft doesn't fit a target of `layers` layers, or itself."""
    wrong = [tap for tap in dspark.target_layer_ids if not isinstance(tap, int) or not 0 <= tap < layers]
    if wrong:
        raise ConfigError(
            f"config.json: dspark_target_layer_ids names layer {wrong[0]!r} of a model of {layers} layers"
        )
    if len(set(dspark.target_layer_ids)) < len(dspark.target_layer_ids):
        raise ConfigError(
            f"config.json: dspark_target_layer_ids {list(dspark.target_layer_ids)} names a layer twice"
        )
    if not 0 <= dspark.noise_token_id < vocab_size:
        raise ConfigError(
            f"config.json: dspark_noise_token_id {dspark.noise_token_id} is past {vocab_size} embeddings"
        )
    for name in ("block_size", "markov_rank"):
        if getattr(dspark, name) < 1:
            raise ConfigError(f"config.json: dspark_{name} is {getattr(dspark, name)}, below its least value")
    if dspark.markov_head_type not in MARKOV_HEADS:
        raise ConfigError(
            f"config.json: dspark_markov_head_type is {dspark.markov_head_type!r}; {MARKOV_HEADS} are known"
        )
    if len(dspark.sts_temperatures) != dspark.block_size:
        raise ConfigError(
            f"config.json: dspark_sts_temperatures holds {len(dspark.sts_temperatures)} temperatures for "
            f"dspark_block_size {dspark.block_size}"
        )
