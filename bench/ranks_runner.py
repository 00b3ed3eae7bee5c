"""A rank of `bench ranks`: a model with dummy weights, its caches, and steps that are given by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import ModelConfig
from engine.model.dummy import dummy_weights
from engine.model.groups import Groups
from engine.model.model import DeepseekV4
from engine.model.share import share_of
from engine.runner.forward import commit_step, forward
from engine.runner.plan import plan_step

PAGES = 3
"""Pages of a request."""
KEPT = 16
"""Rows of a request in one step whose logits are compared, the last ones: all of a decode step."""

SMALL: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 8192, "hidden_size": 256, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1, "sliding_window": 128,
    "index_n_heads": 16, "index_head_dim": 128, "index_topk": 64, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "swiglu_limit": 10.0, "max_position_embeddings": 8192, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
REAL: dict[str, Any] = {
    **SMALL, "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "index_n_heads": 64, "index_topk": 512,
    "max_position_embeddings": 65536,
}  # fmt: skip

Part = list[tuple[int, int]]
"""(slot, new tokens) of a rank's requests in one step."""


@dataclass(frozen=True)
class Job:
    """One comparison: where, in which type, and whether the head is split beside the experts."""

    device: str
    dtype: str
    split_head: bool

    @property
    def config(self) -> ModelConfig:
        """The geometry."""
        return ModelConfig.from_dict(REAL if self.device == "cuda" else SMALL)


class Runner:
    """One rank's part of a model and its caches; computes every row's logits, gives the last of each request.

    slots  requests that it can have
    """

    def __init__(self, job: Job, groups: Groups, slots: int) -> None:
        rank = groups.dp.rank
        device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
        self.config, dtype = job.config, getattr(torch, job.dtype)
        split = job.split_head and groups.dp.size > 1
        share = share_of(self.config, groups, split_head=split)
        weights = dummy_weights(self.config, dtype, device, rule=share.rule)
        self.model = DeepseekV4(
            self.config, weights, device=device, dtype=dtype,
            deterministic=False, kv_rounding="none", groups=groups, split_head=split,
        )  # fmt: skip
        pages = slots * PAGES + 1
        self.state = KVState(self.config, slots + 1, pages, pages, device, dtype)
        entries: list[tuple[int, int, int, int]] = []
        for slot in range(1, slots + 1):
            self.state.bind(slot, 1)
            first = (slot - 1) * PAGES + 1
            entries += [(slot, page, first + page, first + page) for page in range(PAGES)]
        self.state.map_pages(np.array(entries, np.int32))
        self.lengths = [0] * (slots + 1)
        self.epoch = 0

    def step(
        self, part: Part, tokens: Sequence[int], ranks: tuple[tuple[int, int, int], ...]
    ) -> torch.Tensor:
        """One step; logits [rows, V] float32 on the host, in the part's order. ranks: as in RunStep."""
        self.epoch += 1
        job = RunStep(
            epoch=self.epoch,
            mode="mixed" if part else "idle",
            slots=_column(slot for slot, _ in part),
            generations=_column(1 for _ in part),
            starts=_column(self.lengths[slot] for slot, _ in part),
            counts=_column(count for _, count in part),
            tokens=_column(tokens),
            samples=b"\1" * len(part),
            ranks=ranks,
        )
        plan = plan_step(self.state, job, self.model, every_logit=True)
        out = forward(self.model, self.state, plan)
        commit_step(self.model, self.state, plan, out.pending)
        for slot, count in part:
            self.lengths[slot] += count
        pieces = torch.split(out.logits, [count for _, count in part])
        kept = [piece[-KEPT:].cpu() for piece in pieces]
        return torch.cat(kept) if kept else out.logits.cpu()


def tokens_of(part: Part, first: int, lengths: Sequence[int], config: ModelConfig) -> list[int]:
    """Tokens of a part: a function of position and request alone, whoever runs it.

    first  number of the rank's request in slot 0
    """
    return [
        2 + (7919 * (first + slot) + 104729 * (lengths[slot] + i)) % (config.vocab_size - 2)
        for slot, count in part
        for i in range(count)
    ]


def _column(values: Iterable[int]) -> bytes:
    return np.array(list(values), np.int32).tobytes()
