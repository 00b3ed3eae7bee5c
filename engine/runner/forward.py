"""One step on the device: plan, forward, sample, commit. This is the flow of the device thread:

    for bind in step.binds:
        state.bind(bind.slot, bind.generation)
    state.map_pages(np.frombuffer(step.pages, np.int32).reshape(-1, 4))
    plan = plan_step(state, step, model)                            # host only
    out = forward(model, state, plan)                               # no host read, commits nothing
    tokens = sample(out.logits)                                     # row i is plan.batch.logit_rows[i]
    commit_step(model, state, plan, out.pending, lens)              # lens [B]; None: every row
    store_relay(state, slots, tokens)                               # what token -1 of the next step takes

`out.logits` has one row for each row group with `samples` 1, in the order of the step's columns
(`every_logit=True` gives every row instead, for prompt logprobs). A step may be planned while the one before
it runs, once that one's binds and pages are in; `commit_step` must have been called on the step before a
forward of the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.memory.commit import commit
from engine.memory.pools import KVState
from engine.model.model import DeepseekV4
from engine.model.step import Pending, StepOutput, StepRows
from engine.runner.columns import Upload
from engine.runner.plan import Plan, PlannedStep


@torch.inference_mode()
def forward(model: DeepseekV4, state: KVState, plan: Plan, out: Pending | None = None) -> StepOutput:
    """Runs a planned step. Writes pool rows past the committed lengths only.

    out  workspaces of `model.new_pending(padded rows, taps)`, reused between steps; None: new ones
    """
    batch = plan.batch
    pending = out or model.new_pending(batch.load.padded_tokens, len(batch.taps))
    if not batch.load.padded_tokens:
        return StepOutput(torch.empty(0, model.config.vocab_size, device=model.device), pending)
    token_ids = input_ids(state, plan)
    caches = [state.layer(layer) for layer in range(model.config.num_hidden_layers)]
    streams = model.backbone(token_ids, plan.rows, caches, pending, batch.taps)
    return StepOutput(wanted_logits(model, plan, streams, plan.rows), pending)


def wanted_logits(model: DeepseekV4, plan: PlannedStep, streams: Tensor, rows: StepRows) -> Tensor:
    """Logits [R, V] of the rows that the step wants, from streams [T, hc, H]."""
    batch = plan.batch
    if not batch.logit_rows.size and not (model.splits_head and batch.agreed_logits):
        return torch.empty(0, model.config.vocab_size, device=model.device)
    return model.logits(streams.index_select(0, plan.logit_rows), rows.agreed_logits)


def input_ids(state: KVState, plan: PlannedStep) -> Tensor:
    """Tokens of a step's rows [T] int64, relayed ones in their places."""
    if plan.row_slots is None:
        return plan.token_ids
    relayed = state.relay.index_select(0, plan.row_slots)
    return torch.where(plan.token_ids < 0, relayed, plan.token_ids)


@torch.inference_mode()
def commit_step(
    model: DeepseekV4,
    state: KVState,
    plan: PlannedStep,
    pending: Pending,
    lens: Sequence[int] | Tensor | None = None,
) -> None:
    """Commits the first lens[i] rows of request i (None: all); 0 is legal. A tensor stays on its device."""
    if lens is None:
        lens = plan.commit.counts
    elif not isinstance(lens, Tensor):
        lens = Upload(state.device).int64(np.array(lens, dtype=np.int64))
    commit(state, plan.commit, pending, lens, model.ops)


@torch.inference_mode()
def store_relay(state: KVState, slots: Tensor, tokens: Tensor) -> None:
    """Keeps the last sampled token of each slot on the device; both int64 [n]."""
    state.relay.index_copy_(0, slots, tokens)
