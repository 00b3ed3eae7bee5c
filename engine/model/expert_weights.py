"""Router and experts of one layer, as a checkpoint's tensors give them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.expert_layout import Laying
from engine.model.quantised import Fp4Experts, Fp4Weight, Weight, joined
from engine.model.share import Share
from engine.model.taker import Taker


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts as tensors of the model's type: w13 [L, 2 I, H], gate rows first; w2 [L, H, I]."""

    w13: Tensor
    w2: Tensor


@dataclass(frozen=True)
class MoeWeights:
    """gate [E, H], float32 or exact in the model's type; bias [E] float32 or table [V, k] int64;

    routed  the L experts that are here: all of them, or this rank's share
    shared  of the expert that every row uses: w13 [2 I, H], w2 [H, I]
    """

    gate: Tensor
    bias: Tensor | None
    table: Tensor | None
    routed: ExpertWeights | Fp4Experts
    shared_w13: Weight
    shared_w2: Weight

    @property
    def floats(self) -> ExpertWeights:
        """The routed experts as tensors. raises CheckpointError where they are quantised"""
        if isinstance(self.routed, ExpertWeights):
            return self.routed
        raise CheckpointError("experts are in FP4, but these operations take tensors")


def moe_weights(config: ModelConfig, taker: Taker, prefix: str, share: Share, *, hashed: bool) -> MoeWeights:
    """Router and this rank's experts of one layer, experts stacked. raises CheckpointError."""
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    wide, shared = inner * config.n_shared_experts, f"{prefix}.shared_experts"
    gate_up = [taker.matrix(f"{shared}.{name}.weight", (wide, hidden)) for name in ("w1", "w3")]
    table_shape = (config.vocab_size, config.num_experts_per_tok)
    return MoeWeights(
        taker.exact(f"{prefix}.gate.weight", experts, hidden),
        None if hashed else taker.fp32(f"{prefix}.gate.bias", experts),
        taker.take(f"{prefix}.gate.tid2eid", table_shape, torch.int64) if hashed else None,
        _routed(config, taker, f"{prefix}.experts", share.experts),
        joined(gate_up),
        taker.matrix(f"{shared}.w2.weight", (hidden, wide)),
    )


def _routed(config: ModelConfig, taker: Taker, prefix: str, experts: range) -> ExpertWeights | Fp4Experts:
    """The experts of this rank, each written to its place as it comes: none is there twice for long."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    first = taker.stored(f"{prefix}.{experts.start}.w1.weight", (inner, hidden))
    if taker.keeps and isinstance(first, Fp4Weight):
        return _packed(config, taker, prefix, experts)
    w13 = torch.empty(len(experts), 2 * inner, hidden, device=taker.device, dtype=taker.dtype)
    w2 = torch.empty(len(experts), hidden, inner, device=taker.device, dtype=taker.dtype)
    for place, expert in enumerate(experts):
        own = f"{prefix}.{expert}"
        w13[place, :inner] = taker.take(f"{own}.w1.weight", (inner, hidden))
        w13[place, inner:] = taker.take(f"{own}.w3.weight", (inner, hidden))
        w2[place] = taker.take(f"{own}.w2.weight", (hidden, inner))
    return ExpertWeights(w13, w2)


def _packed(config: ModelConfig, taker: Taker, prefix: str, experts: range) -> Fp4Experts:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    layer = Laying(len(experts), hidden, inner, taker.device)
    shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    for place, expert in enumerate(experts):
        for part, shape in shapes.items():
            name = f"{prefix}.{expert}.{part}.weight"
            found = taker.stored(name, shape)
            if not isinstance(found, Fp4Weight):
                raise CheckpointError(f"tensor {name!r} isn't in FP4, but the first expert is")
            layer.put(place, part, found)
    return layer.done(prefix)
