"""A checkpoint's tensors, checked against the configuration and laid out as the layers use them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model.config import C4, C128, ModelConfig
from engine.model.expert_weights import MoeWeights, moe_weights
from engine.model.quantised import Fp8Weight, Weight, joined
from engine.model.share import Share
from engine.model.taker import Taker


@dataclass(frozen=True)
class MhcWeights:
    """fn [(2 + hc) hc, hc H], base and scale [(2 + hc) hc], norm [H], all float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


@dataclass(frozen=True)
class HeadWeights:
    """Collapse of streams: fn [hc, hc H], base [hc], scale [1]; norm [H], all float32.

    head [V, H] is float32, or exact in the model's type where weights are kept; where the vocabulary is split
    over ranks, it holds this rank's rows.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor
    head: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """One layer's compressors, float32 but for `side`.

    side   [C, H], all latent and score projections in the order of a pending row; float32, or exact in the
           model's type where weights are kept
    ape    [ratio, C], position bias of the scores, zero for the latents
    norm   [D]; index_norm [Di] where ratio is 4
    """

    side: Tensor
    ape: Tensor
    norm: Tensor
    index_norm: Tensor | None


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b [heads * Di, q_lora]; head_weights [heads, H] float32, the score constants folded in.

    Where weights are kept, head_weights are as stored: a positive factor of all scores changes no choice.
    """

    wq_b: Weight
    head_weights: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """w_in [q_lora + D, H] holds wq_a then wkv; wo_a [groups, rank, width]; sink [heads] float32.

    Where wo_a is in FP8, its groups lie behind each other: [groups rank, width].
    """

    w_in: Weight
    q_norm: Tensor
    wq_b: Weight
    kv_norm: Tensor
    wo_a: Weight
    wo_b: Weight
    sink: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """One backbone layer."""

    ratio: int
    attn_mhc: MhcWeights
    attention: AttentionWeights
    ffn_mhc: MhcWeights
    moe: MoeWeights


def head_weights(config: ModelConfig, taker: Taker, share: Share) -> HeadWeights:
    """The final collapse, norm and vocabulary projection. raises CheckpointError."""
    hc, hidden = config.hc_mult, config.hidden_size
    return HeadWeights(
        taker.fp32("hc_head_fn", hc, hc * hidden),
        taker.fp32("hc_head_base", hc),
        taker.fp32("hc_head_scale", 1),
        taker.fp32("norm.weight", hidden),
        taker.exact("head.weight", len(share.vocabulary), hidden),
    )


def layer_weights(config: ModelConfig, taker: Taker, layer: int, share: Share) -> LayerWeights:
    """Layer `layer` of the backbone. raises CheckpointError naming the tensor."""
    hashed = layer < config.num_hash_layers
    return block_weights(
        config, taker, f"layers.{layer}", config.compress_ratios[layer], share, hashed=hashed
    )


def block_weights(
    config: ModelConfig, taker: Taker, prefix: str, ratio: int, share: Share, *, hashed: bool
) -> LayerWeights:
    """The layer or draft stage whose tensors begin with `prefix`. raises CheckpointError."""
    return LayerWeights(
        ratio,
        _mhc(config, taker, prefix, "attn"),
        attention_weights(config, taker, f"{prefix}.attn", ratio),
        _mhc(config, taker, prefix, "ffn"),
        moe_weights(config, taker, f"{prefix}.ffn", share, hashed=hashed),
    )


def _mhc(config: ModelConfig, taker: Taker, prefix: str, block: str) -> MhcWeights:
    hc, hidden = config.hc_mult, config.hidden_size
    wide = (2 + hc) * hc
    scale = taker.fp32(f"{prefix}.hc_{block}_scale", 3)
    repeats = torch.tensor([hc, hc, hc * hc], device=scale.device)
    return MhcWeights(
        taker.fp32(f"{prefix}.hc_{block}_fn", wide, hc * hidden),
        taker.fp32(f"{prefix}.hc_{block}_base", wide),
        scale.repeat_interleave(repeats),
        taker.fp32(f"{prefix}.{block}_norm.weight", hidden),
    )


def attention_weights(config: ModelConfig, taker: Taker, prefix: str, ratio: int) -> AttentionWeights:
    """Attention of one layer of compress ratio `ratio`. raises CheckpointError."""
    hidden, wide, lora = config.hidden_size, config.head_dim, config.q_lora_rank
    groups, rank, width = config.o_groups, config.o_lora_rank, config.head_group_width
    wq_a = taker.matrix(f"{prefix}.wq_a.weight", (lora, hidden))
    wkv = taker.matrix(f"{prefix}.wkv.weight", (wide, hidden))
    wo_a = taker.matrix(f"{prefix}.wo_a.weight", (groups * rank, width))
    return AttentionWeights(
        joined([wq_a, wkv]),
        taker.fp32(f"{prefix}.q_norm.weight", lora),
        taker.matrix(f"{prefix}.wq_b.weight", (config.num_attention_heads * wide, lora)),
        taker.fp32(f"{prefix}.kv_norm.weight", wide),
        replace(wo_a, groups=groups) if isinstance(wo_a, Fp8Weight) else wo_a.view(groups, rank, width),
        taker.matrix(f"{prefix}.wo_b.weight", (hidden, groups * rank)),
        taker.fp32(f"{prefix}.attn_sink", config.num_attention_heads),
        _compressor(config, taker, prefix, ratio),
        _indexer(config, taker, f"{prefix}.indexer") if ratio == C4 else None,
    )


def _compressor(config: ModelConfig, taker: Taker, prefix: str, ratio: int) -> CompressorWeights | None:
    if ratio == 0:
        return None
    main = _Projections(config, taker, f"{prefix}.compressor", ratio, config.head_dim)
    if ratio == C128:
        ape = torch.cat([torch.zeros_like(main.ape), main.ape], dim=1)
        return CompressorWeights(torch.cat([main.wkv, main.wgate]), ape, main.norm, None)
    index = _Projections(config, taker, f"{prefix}.indexer.compressor", ratio, config.index_head_dim)
    sides: list[Tensor] = []
    biases: list[Tensor] = []
    for half in range(2):
        pair = [(p, slice(half * p.width, (half + 1) * p.width)) for p in (main, index)]
        sides += [p.wkv[part] for p, part in pair] + [p.wgate[part] for p, part in pair]
        biases += [torch.zeros_like(p.ape[:, part]) for p, part in pair] + [
            p.ape[:, part] for p, part in pair
        ]
    return CompressorWeights(torch.cat(sides), torch.cat(biases, dim=1), main.norm, index.norm)


class _Projections:
    """The tensors of one compressor as the checkpoint names them."""

    def __init__(self, config: ModelConfig, taker: Taker, prefix: str, ratio: int, width: int) -> None:
        channels = (2 if ratio == C4 else 1) * width
        self.width = width
        self.wkv = taker.exact(f"{prefix}.wkv.weight", channels, config.hidden_size)
        self.wgate = taker.exact(f"{prefix}.wgate.weight", channels, config.hidden_size)
        self.ape = taker.fp32(f"{prefix}.ape", ratio, channels)
        self.norm = taker.fp32(f"{prefix}.norm.weight", width)


def _indexer(config: ModelConfig, taker: Taker, prefix: str) -> IndexerWeights:
    heads, width = config.index_n_heads, config.index_head_dim
    constants = width**-0.5 * heads**-0.5
    wq_b = taker.matrix(f"{prefix}.wq_b.weight", (heads * width, config.q_lora_rank))
    proj = taker.exact(f"{prefix}.weights_proj.weight", heads, config.hidden_size)
    return IndexerWeights(wq_b, proj if taker.keeps else proj * constants)
