"""The classic multi-token-prediction module: one layer that takes the target's last streams and the token
after them, and predicts the token after that one. It drafts a token at a time, the second and later ones from
its own streams.

A row's KV follows from its own streams and next token alone, so committed rows are injected by projection. A
draft's first row stands at position L - 1 with the anchor as its next token; row k at L - 1 + k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.model.config import ModelConfig
from engine.model.draft import Choose, Drafted, DraftRows, InjectRows, greedy, nothing
from engine.model.draft_layers import DraftLayers
from engine.model.draft_ring import RING, BlockPlan, DraftState, to_device, window_keys
from engine.model.draft_weights import draft_head, stage_weights
from engine.model.markov import whole_vectors
from engine.model.model import DeepseekV4
from engine.model.quantised import Weight, rows_of
from engine.model.taker import Taker
from engine.model.weights import HeadWeights, LayerWeights


@dataclass(frozen=True)
class ClassicWeights:
    """e_proj, h_proj [H, H]; enorm, hnorm [H] float32; wkv [D, H], the layer's own; head as DSpark's."""

    e_proj: Weight
    h_proj: Weight
    enorm: Tensor
    hnorm: Tensor
    wkv: Weight
    layer: LayerWeights
    head: HeadWeights


def classic_weights(config: ModelConfig, taker: Taker, head: Tensor) -> ClassicWeights:
    """The module `mtp.0` beside the target's `head`. raises CheckpointError naming the tensor."""
    (layer,) = stage_weights(config, taker, 1)
    hidden, lora = config.hidden_size, config.q_lora_rank
    return ClassicWeights(
        taker.matrix("mtp.0.e_proj.weight", (hidden, hidden)),
        taker.matrix("mtp.0.h_proj.weight", (hidden, hidden)),
        taker.fp32("mtp.0.enorm.weight", hidden),
        taker.fp32("mtp.0.hnorm.weight", hidden),
        rows_of(layer.attention.w_in, lora, lora + config.head_dim),
        layer,
        draft_head(config, taker, "mtp.0", head),
    )


class ClassicDrafter:
    """A Drafter of one module; its confidence in a token is the probability of the likeliest one.

    Of a token that was drawn, its own would do better; but it says how many drafts are verified, and a cut
    that depends on the token it cuts changes the distribution of what is emitted.

    block  gamma; 0: as many as config.json's num_nextn_predict_layers
    """

    needs_next_tokens = True
    rereads_logits = True

    def __init__(
        self, config: ModelConfig, weights: ClassicWeights, model: DeepseekV4, block: int = 0
    ) -> None:
        self.config, self.model, self.ops, self.weights = config, model, model.ops, weights
        self.block = block or max(1, config.num_nextn_predict_layers)
        first = config.num_hidden_layers
        self.taps = tuple(range(first, first + config.hc_mult))
        self.layers = DraftLayers(config, (weights.layer,), model)

    def new_state(self, slots: int) -> DraftState:
        """As Drafter.new_state."""
        config, model = self.config, self.model
        pool = torch.zeros(
            1, slots * (RING + self.block), config.head_dim, dtype=model.dtype, device=model.device
        )
        shape = (slots, config.hc_mult, config.hidden_size)
        return DraftState(pool, self.block, torch.zeros(shape, dtype=model.dtype, device=model.device))

    @torch.inference_mode()
    def inject(self, state: DraftState, rows: InjectRows, taps: Tensor) -> None:
        """As Drafter.inject; the input streams of each slot's last row are kept for its next draft."""
        if not rows.positions.shape[0]:
            return
        if rows.next_tokens is None:
            raise ShapeMismatch(f"{rows.positions.shape[0]} rows came without the token after each of them")
        assert state.carried is not None
        streams = self._enter(taps.transpose(0, 1).contiguous(), rows.next_tokens)
        config, layer = self.config, self.weights.layer
        eps = config.rms_norm_eps
        x, _, _ = self.ops.mhc_pre(streams, layer.attn_mhc, config.hc_sinkhorn_iters, config.hc_eps, eps)
        latent = self.ops.rms_norm(self.ops.linear(x, self.weights.wkv), layer.attention.kv_norm, eps)
        self.ops.rotate(latent.unsqueeze(1), self.layers.turns(rows.positions))
        into = state.ring_rows(rows.slots, rows.positions)
        state.pool[0].index_copy_(0, into, self.model.rounding.latent(latent))
        newest = rows.positions.new_full((state.carried.shape[0],), -1)
        newest.scatter_reduce_(0, rows.slots, rows.positions, "amax")
        is_last = rows.positions == newest.index_select(0, rows.slots)
        # Rows that aren't their slot's last go to the sink.
        state.carried.index_copy_(0, torch.where(is_last, rows.slots, 0), streams)

    @torch.inference_mode()
    def draft(
        self, state: DraftState, rows: DraftRows, choose: Choose = greedy, *, keep_logits: bool = False
    ) -> Drafted:
        """As Drafter.draft."""
        if not rows.slots.size:
            return nothing(self.block, self.config.vocab_size, self.model.device, keep_logits=keep_logits)
        assert state.carried is not None
        streams = state.carried.index_select(0, to_device(rows.slots, self.model.device))
        tokens, chosen, confidences, kept = rows.anchors, [], [], []
        for k in range(self.block):
            if k:
                streams = self._enter(streams, tokens)
            plan = self._plan(state, rows, k)
            packed = to_device(plan.packed(), self.model.device)
            streams = self.layers.forward(state, streams, tokens, packed, plan.shape)
            head, config = self.weights.head, self.config
            z = self.ops.logits(streams, head, config.hc_eps, config.rms_norm_eps)
            tokens = choose(k, z)
            chosen.append(tokens)
            confidences.append(z.amax(1) - z.logsumexp(1))
            kept.append(z)
        survival = whole_vectors(torch.exp, torch.stack(confidences).cumsum(0)).t().contiguous()
        logits = torch.stack(kept, dim=1) if keep_logits else None
        return Drafted(torch.stack(chosen, dim=1), survival, logits)

    def _enter(self, streams: Tensor, tokens: Tensor) -> Tensor:
        """The module's input streams [n, hc, H] from streams before it and the tokens [n] after them."""
        own, ops, eps = self.weights, self.ops, self.config.rms_norm_eps
        embedded = ops.rms_norm(self.model.embed.index_select(0, tokens), own.enorm, eps)
        normed = ops.rms_norm(streams.flatten(0, 1), own.hnorm, eps)
        return ops.linear(embedded, own.e_proj).unsqueeze(1) + ops.linear(normed, own.h_proj).view_as(streams)

    def _plan(self, state: DraftState, rows: DraftRows, k: int) -> BlockPlan:
        """Row k of each draft sees its window: ring rows before L - 1, then the draft's rows up to itself."""
        first, window = rows.slots * state.stride, self.config.sliding_window
        position = rows.lengths - 1 + k
        keys, held = window_keys(first, position - window + 1, rows.lengths - 1, rows.valid_from, window)
        own = first[:, None] + RING + np.arange(k + 1)
        keys = np.where(held, keys, own[:, -1:])
        # Only a draft longer than the window has rows of its own that the last one no longer sees.
        near = np.broadcast_to(np.arange(k + 1) > k - window, own.shape)
        seen = np.concatenate([held, near], axis=1)
        return BlockPlan(position[:, None], own[:, -1:], np.concatenate([keys, own], axis=1), seen)
