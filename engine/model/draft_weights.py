"""Tensors of a DSpark draft, laid out as the drafter uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.draft_layout import draft_geometry
from engine.model.fields import DSparkConfig
from engine.model.markov import MarkovWeights
from engine.model.quantised import Weight, joined, rows_of
from engine.model.share import Share
from engine.model.taker import Taker
from engine.model.weights import HeadWeights, LayerWeights, block_weights


@dataclass(frozen=True)
class Injection:
    """From taps to every stage's latents: main_proj [H, taps * H], main_norm [H] float32;

    wkv [stages * D, H], all stages' projections; kv_norm [stages, D] float32
    """

    main_proj: Weight
    main_norm: Tensor
    wkv: Weight
    kv_norm: Tensor


@dataclass(frozen=True)
class DSparkWeights:
    """A whole draft; head ends in the target's own vocabulary projection; confidence [1, H (+ r)] or None."""

    injection: Injection
    stages: tuple[LayerWeights, ...]
    head: HeadWeights
    markov: MarkovWeights
    confidence: Tensor | None


def stage_weights(config: ModelConfig, taker: Taker, stages: int) -> tuple[LayerWeights, ...]:
    """Decoder layers `mtp.0` to `mtp.<stages - 1>`, every expert here; config is the draft's geometry."""
    share = Share(range(config.n_routed_experts), range(config.vocab_size))
    return tuple(
        block_weights(config, taker, f"mtp.{stage}", 0, share, hashed=False) for stage in range(stages)
    )


def draft_head(config: ModelConfig, taker: Taker, prefix: str, head: Tensor) -> HeadWeights:
    """The collapse and norm below `prefix`, and the target's vocabulary projection `head` [V, H]."""
    hc, hidden = config.hc_mult, config.hidden_size
    return HeadWeights(
        taker.fp32(f"{prefix}.hc_head_fn", hc, hc * hidden),
        taker.fp32(f"{prefix}.hc_head_base", hc),
        taker.fp32(f"{prefix}.hc_head_scale", 1),
        taker.fp32(f"{prefix}.norm.weight", hidden),
        head,
    )


def dspark_weights(config: ModelConfig, taker: Taker, stages: int, head: Tensor) -> DSparkWeights:
    """The draft of `stages` stages. raises CheckpointError naming the tensor."""
    dspark = config.dspark
    if dspark is None:
        raise CheckpointError("DSpark stages need the dspark_* fields of config.json")
    own, last = draft_geometry(config), f"mtp.{stages - 1}"
    layers = stage_weights(own, taker, stages)
    hidden, taps = config.hidden_size, len(dspark.target_layer_ids)
    lora, wide = config.q_lora_rank, config.head_dim
    injection = Injection(
        taker.matrix("mtp.0.main_proj.weight", (hidden, taps * hidden)),
        taker.fp32("mtp.0.main_norm.weight", hidden),
        joined([rows_of(layer.attention.w_in, lora, lora + wide) for layer in layers]),
        torch.stack([layer.attention.kv_norm for layer in layers]),
    )
    return DSparkWeights(
        injection,
        layers,
        draft_head(config, taker, last, head),
        _markov(config, dspark, taker, f"{last}.markov_head"),
        _confidence(config, dspark, taker, f"{last}.confidence_head.proj.weight"),
    )


def _markov(config: ModelConfig, dspark: DSparkConfig, taker: Taker, prefix: str) -> MarkovWeights:
    rank, hidden = dspark.markov_rank, config.hidden_size
    w1, w2 = (
        taker.take(f"{prefix}.{name}.weight", (config.vocab_size, rank))
        for name in ("markov_w1", "markov_w2")
    )
    if dspark.markov_head_type == "vanilla":
        return MarkovWeights("vanilla", w1, w2, None, None)
    name, rows, columns = {
        "gated": ("gate_proj", rank, hidden + rank),
        "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden),
    }[dspark.markov_head_type]
    return MarkovWeights(
        dspark.markov_head_type,
        w1,
        w2,
        taker.take(f"{prefix}.{name}.weight", (rows, columns)),
        taker.fp32(f"{prefix}.{name}.bias", rows),
    )


def _confidence(config: ModelConfig, dspark: DSparkConfig, taker: Taker, name: str) -> Tensor | None:
    if not dspark.has_confidence:
        return None
    return taker.fp32(name, 1, config.hidden_size + dspark.markov_rank * dspark.confidence_with_markov)
