"""The DSpark draft model: committed rows' taps become KV of three stages; one pass over a block of the anchor
and noise tokens gives the logits of gamma tokens, which a Markov head then ties together from left to right.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.draft import BlockChoose, Choose, Drafted, DraftRows, InjectRows, greedy, nothing
from engine.model.draft_layers import DraftLayers
from engine.model.draft_layout import draft_geometry
from engine.model.draft_ring import RING, BlockPlan, BlockShape, DraftState, to_device, window_keys
from engine.model.draft_weights import DSparkWeights
from engine.model.markov import Confidence, MarkovHead
from engine.model.model import DeepseekV4


class DSparkDrafter:
    """A Drafter on a target's embedding, head and operations.

    block    gamma; 0: the checkpoint's. Past the checkpoint's block, confidences are not calibrated
    raises   ConfigError where the target holds only a part of the head, or of another vocabulary
    """

    needs_next_tokens = False
    rereads_logits = False

    def __init__(
        self, config: ModelConfig, weights: DSparkWeights, model: DeepseekV4, block: int = 0
    ) -> None:
        if config.dspark is None:
            raise ConfigError("config.json has no dspark_* fields: there is no DSpark draft")
        dspark, self.model, self.ops = config.dspark, model, model.ops
        self.config, self.weights = draft_geometry(config), weights
        self.block = block or dspark.block_size
        self.taps, self.noise = dspark.target_layer_ids, dspark.noise_token_id
        self.injection, self.head = weights.injection, weights.head
        self.layers = DraftLayers(self.config, weights.stages, model)
        self.markov = MarkovHead(self.ops, weights.markov)
        table = [*dspark.sts_temperatures, *[1.0] * self.block][: self.block]
        temperatures = torch.tensor(table, device=model.device)
        self.confidence = (
            None if weights.confidence is None else Confidence(self.ops, weights.confidence, temperatures)
        )

    def new_state(self, slots: int) -> DraftState:
        """As Drafter.new_state."""
        shape = (len(self.layers.layers), slots * (RING + self.block), self.config.head_dim)
        return DraftState(torch.zeros(shape, dtype=self.model.dtype, device=self.model.device), self.block)

    @torch.inference_mode()
    def inject(self, state: DraftState, rows: InjectRows, taps: Tensor) -> None:
        """As Drafter.inject: one projection to main_x, one to all stages' latents."""
        count = rows.positions.shape[0]
        if not count:
            return
        ops, own, eps = self.ops, self.injection, self.config.rms_norm_eps
        joined = taps.transpose(0, 1).reshape(count, -1)
        main_x = ops.rms_norm(ops.linear(joined, own.main_proj), own.main_norm, eps)
        wide = self.config.head_dim
        latent = ops.rms_norm(ops.linear(main_x, own.wkv).float().view(-1, wide), None, eps)
        latent = (latent.view(count, -1, wide) * own.kv_norm).to(state.pool.dtype)
        ops.rotate(latent, self.layers.turns(rows.positions))
        into = state.ring_rows(rows.slots, rows.positions)
        state.pool.index_copy_(1, into, self.model.rounding.latent(latent).transpose(0, 1))

    @torch.inference_mode()
    def draft(
        self, state: DraftState, rows: DraftRows, choose: Choose = greedy, *, keep_logits: bool = False
    ) -> Drafted:
        """As Drafter.draft."""
        if not rows.slots.size:
            return nothing(self.block, self.config.vocab_size, self.model.device, keep_logits=keep_logits)
        plan = self.plan(state, rows)
        hidden = self.passed(state, rows.anchors, to_device(plan.packed(), self.model.device), plan.shape)
        return self.chosen(hidden, rows.anchors, choose, keep_logits=keep_logits)

    def passed(self, state: DraftState, anchors: Tensor, packed: Tensor, shape: BlockShape) -> Tensor:
        """What the stages make of blocks of the anchors [B] and noise; [B, gamma, H]. No host read.

        packed, shape  of `plan`, on the device
        """
        ids = torch.cat([anchors[:, None], anchors.new_full((len(anchors), self.block - 1), self.noise)], 1)
        ids = ids.flatten()
        streams = self.layers.forward(state, self.model.streams(ids), ids, packed, shape)
        hidden = self.ops.collapse(streams, self.head, self.config.hc_eps, self.config.rms_norm_eps)
        return hidden.view(-1, self.block, hidden.shape[-1])

    def plan(self, state: DraftState, rows: DraftRows) -> BlockPlan:
        """Every row of a block sees the last rows before it and the whole block."""
        first, window = rows.slots * state.stride, self.config.sliding_window
        keys, held = window_keys(first, rows.lengths - window, rows.lengths, rows.valid_from, window)
        offsets = np.arange(self.block)
        own = first[:, None] + RING + offsets
        keys = np.where(held, keys, own[:, :1])
        seen = np.concatenate([held, np.ones(own.shape, np.bool_)], axis=1)
        return BlockPlan(rows.lengths[:, None] + offsets, own, np.concatenate([keys, own], axis=1), seen)

    @torch.inference_mode()
    def chosen(self, hidden: Tensor, anchors: Tensor, choose: Choose, *, keep_logits: bool) -> Drafted:
        """From `passed`'s hidden: one token after the other, each biased by the one before it."""
        count, ops = anchors.shape[0], self.ops
        # Position by position from here on: [gamma, B, ...].
        hidden = hidden.transpose(0, 1).contiguous()
        normed = ops.rms_norm(hidden.flatten(0, 1), self.head.norm, self.config.rms_norm_eps)
        logits = ops.project(normed, self.head.head).view(self.block, count, -1)
        hidden = hidden.float()
        if isinstance(choose, BlockChoose) and self.markov.weights.kind == "vanilla":
            return self._choose_block(logits, hidden, anchors, choose, keep_logits=keep_logits)
        state, previous = self.markov.start(count), anchors
        chosen: list[Tensor] = []
        seen: list[Tensor] = []
        for k in range(self.block):
            embedded = self.markov.embed(previous)
            bias, state = self.markov.bias(embedded, hidden[k], state)
            previous = choose(k, logits[k].add_(bias))
            chosen.append(previous)
            seen.append(embedded)
        kept = logits.transpose(0, 1).contiguous() if keep_logits else None
        return Drafted(torch.stack(chosen, dim=1), self._survival(hidden, torch.stack(seen)), kept)

    def _choose_block(
        self, logits: Tensor, hidden: Tensor, anchors: Tensor, choose: BlockChoose, *, keep_logits: bool
    ) -> Drafted:
        """From logits [gamma, B, V] and hidden [gamma, B, H] float32: the whole block at once."""
        weights = self.markov.weights
        ids, stats = choose.block(logits, anchors, weights.w1, weights.w2)
        seen = torch.cat([anchors[None], ids.t()[:-1]])
        embedded = self.markov.embed(seen.flatten()).view(*seen.shape, -1)
        survival = self._survival(hidden, embedded)
        return (
            Drafted(ids, survival, logits.transpose(0, 1), stats)
            if keep_logits
            else Drafted(ids, survival, None)
        )

    def _survival(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[B, gamma] from hidden [gamma, B, H] and embedded [gamma, B, r], float32."""
        if self.confidence is None:
            return torch.ones(hidden.shape[1], self.block, device=hidden.device)
        return self.confidence.survival(hidden, embedded)
