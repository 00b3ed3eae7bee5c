"""A small draft beside a small target, on any set of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu import CpuOps
from engine.model.config import ModelConfig
from engine.model.draft import Choose, Drafted, Drafter, DraftRows, InjectRows, greedy
from engine.model.draft_loading import load_drafter
from engine.model.draft_ring import DraftState
from engine.model.dummy import dummy_weights
from engine.model.invariant import TileOps
from engine.model.layout import FLOAT_LAYOUT
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.tensor_specs import Draft

CPU = torch.device("cpu")
OPS = {"torch": TorchOps, "tiles": TileOps, "native": CpuOps}

FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 32, "sliding_window": 128, "compress_ratios": [0, 4, 128, 0, 0, 0, 0],
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 4096, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    "num_hash_layers": 1, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
DSPARK = {
    "dspark_block_size": 5, "dspark_noise_token_id": 299, "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}  # fmt: skip


def draft_weights(config: ModelConfig, draft: Draft, seed: int = 3) -> dict[str, Tensor]:
    """Weights of target and draft."""
    layout = replace(FLOAT_LAYOUT, draft=draft, stages=3 if draft is Draft.DSPARK else 1)
    return dummy_weights(config, torch.float32, CPU, seed, layout=layout)


@dataclass
class Case:
    """A drafter with requests whose taps are random: of slot s, `history[s]` [K, L, H].

    KV is poisoned with NaN at first: what is read and wasn't written shows.
    """

    fields: dict[str, Any] = field(default_factory=lambda: FIELDS | DSPARK)
    draft: Draft = Draft.DSPARK
    ops: str = "torch"
    block: int = 0
    rounding: str = "none"
    dtype: torch.dtype = torch.float32
    slots: int = 9
    history: dict[int, Tensor] = field(default_factory=dict)
    next_tokens: dict[int, Tensor] = field(default_factory=dict)
    drafter: Drafter = field(init=False)
    state: DraftState = field(init=False)

    def __post_init__(self) -> None:
        self.config = ModelConfig.from_dict(self.fields)
        self.weights = draft_weights(self.config, self.draft)
        if self.dtype != torch.float32:
            self.weights = {name: tensor.to(self.dtype) for name, tensor in self.weights.items()}
        self.model = DeepseekV4(
            self.config, self.weights, device=CPU, dtype=self.dtype, deterministic=self.ops != "torch",
            kv_rounding=self.rounding, ops=OPS[self.ops](),
        )  # fmt: skip
        self.drafter = load_drafter(self.config, self.weights, self.model, block=self.block)
        self.state = self.drafter.new_state(self.slots)
        self.state.pool.fill_(torch.nan)

    def request(self, slot: int, length: int, seed: int, pieces: Sequence[int] = (), begin: int = 0) -> None:
        """A request of `length` committed rows, injected from `begin` on in pieces of these sizes in turn."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.drafter.taps), length, self.config.hidden_size)
        self.history[slot] = torch.randn(shape, generator=generator).to(self.dtype)
        self.next_tokens[slot] = torch.randint(0, self.config.vocab_size, (length,), generator=generator)
        sizes, at, turn = list(pieces) or [128], begin, 0
        while at < length:
            stop = min(at + sizes[turn % len(sizes)], length)
            self.inject([(slot, at, stop)])
            at, turn = stop, turn + 1

    def inject(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Injects (slot, first, stop) rows, all in one call."""
        slots = torch.cat([torch.full((stop - first,), slot) for slot, first, stop in spans])
        positions = torch.cat([torch.arange(first, stop) for _, first, stop in spans])
        tokens = torch.cat([self.next_tokens[slot][first:stop] for slot, first, stop in spans])
        taps = torch.cat([self.history[slot][:, first:stop] for slot, first, stop in spans], 1)
        self.drafter.inject(self.state, InjectRows(slots, positions, tokens), taps)

    def anchor(self, slot: int) -> int:
        """The token after the last row."""
        return int(self.next_tokens[slot][-1])

    def run(self, slots: Sequence[int], valid_from: Sequence[int] = (), choose: Choose = greedy) -> Drafted:
        """Drafts for these slots, logits kept."""
        lengths = np.array([self.history[slot].shape[1] for slot in slots], np.int64)
        since = np.array(valid_from or [0] * len(slots), np.int64)
        anchors = torch.tensor([self.anchor(slot) for slot in slots], dtype=torch.int64)
        rows = DraftRows(np.array(slots, np.int64), lengths, since, anchors)
        return self.drafter.draft(self.state, rows, choose, keep_logits=True)
