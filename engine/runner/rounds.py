"""One step with speculation: inject, draft, layout, verify, accept, commit, beside chunks of prompts.

A row group whose `verify` is above 0 decodes: it runs its anchor and a prefix of its draft. Any other group
is a chunk, with one row too: a prefill that exists only for one token's logprobs has `verify` 0, is sampled
as chunks are, and never joins the decoding groups.

The runner knows every slot's committed length on the host, since the results of a step are awaited before
the next one begins. So plans are exact, and a step waits for its device twice: for the drafts' survival,
which says how many rows run, and for the results.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.memory.pools import KVState
from engine.messages import RunStep, StepDone
from engine.model.model import DeepseekV4
from engine.model.step import StepOutput
from engine.runner.acceptance import Acceptance
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.answers import Answers, Outcome, Wanted
from engine.runner.batch import build_batch
from engine.runner.columns import Int, Upload
from engine.runner.decoding import (
    Decoding,
    Laid,
    StepColumns,
    decoding_groups,
    laid_step,
    read_columns,
    survival_column,
    verified_column,
    write_drafts,
)
from engine.runner.forward import commit_step, forward, input_ids, store_relay
from engine.runner.plan import Plan, plan_batch
from engine.runner.speculative import Drafts, Speculation
from engine.runner.taps import ragged
from engine.runner.verdicts import Verdict, judge


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's part of a step.

    names   int64, the RunStep's number of each of the batch's groups
    places  int64 [n], the batch's number of each decoding group
    """

    plan: Plan
    out: StepOutput
    wanted: Wanted
    names: Int
    places: Int


class Rounds:
    """Executes steps that have `verify`; the seams between its stages are its methods."""

    def __init__(self, model: DeepseekV4, state: KVState, answers: Answers, speculation: Speculation) -> None:
        self.model, self.state, self.speculation = model, state, speculation
        self.answers, self.bindings = answers, answers.bindings
        self.acceptance = Acceptance(self.bindings.parameters, self.bindings.counts)
        self._to = Upload(state.device)

    def execute(self, job: RunStep, began: float) -> StepDone:
        """Runs a step whose binds and pages are in. raises PageAccounting, ShapeMismatch"""
        columns = read_columns(job, self.state)
        decoding = decoding_groups(columns, self.speculation.ring.lengths, self.bindings, self.state)
        laid = self.layout(decoding, self.draft(decoding, job.budget), job.budget)
        drafted_at = time.perf_counter()
        verified = self.verify(job, columns, decoding, laid)
        verified_at = time.perf_counter()
        outcome = Outcome(failed=self._broken(columns))
        verdict = self.accept(job.epoch, decoding, laid, verified, outcome)
        self.commit(decoding, verified, verdict)
        slots = columns.slots.tolist()
        names, logits = verified.names.tolist(), verified.out.logits
        if verified.wanted.sampled:
            relays = self.answers.sample(logits, verified.plan.batch, verified.wanted, names, outcome)
            store_relay(self.state, *relays)
        counts, token_ids = outcome.columns(len(slots))
        ended_at = time.perf_counter()
        return StepDone(
            epoch=job.epoch,
            counts=counts,
            token_ids=token_ids,
            failed=tuple(sorted(outcome.failed.items())),
            logprobs=self.answers.logprobs(logits, slots, outcome, verified.wanted, names),
            seconds=time.perf_counter() - began,
            verified=verified_column(len(slots), decoding, laid),
            survival=survival_column(len(slots), decoding, laid),
            lengths=self.speculation.ring.lengths[columns.slots].astype(np.int32).tobytes(),
            phases=(drafted_at - began, verified_at - drafted_at, ended_at - verified_at),
        )

    def draft(self, decoding: Decoding, budget: int) -> Drafts | None:
        """Injects and drafts; None where the budget is 0 or no group may verify a draft."""
        if not budget or not (decoding.caps > 1).any():
            return None
        self.speculation.inject(decoding.slots, decoding.anchors)
        slots = tuple(decoding.slots.tolist())
        choose = self.acceptance.choose(slots, tuple((decoding.lengths + 1).tolist()))
        sampled = any(not self.bindings.parameters.of(slot).greedy for slot in slots)
        return self.speculation.draft(decoding.slots, decoding.anchors, choose, keep_logits=sampled)

    def layout(self, decoding: Decoding, drafts: Drafts | None, budget: int) -> Laid:
        """How many rows each group runs."""
        if drafts is None:
            ones = np.ones_like(decoding.caps)
            return Laid(None, ones, ones)
        return Laid(drafts, *self.speculation.layout(drafts, decoding.caps, budget))

    def verify(self, job: RunStep, columns: StepColumns, decoding: Decoding, laid: Laid) -> Verified:
        """The target forward over chunks and verified rows."""
        step, names = laid_step(job, columns, decoding, laid.rows)
        batch = build_batch(
            step, rank=self.model.groups.dp.rank, row_tile=self.model.row_tile,
            idle_runs=self.model.needs_every_rank, every_logit=False, taps=self.speculation.drafter.taps,
            graph_key="", tbo_boundary=-1, cp_segments=(),
        )  # fmt: skip
        places = np.searchsorted(names, decoding.groups)
        first_rows = (np.cumsum(batch.counts, dtype=np.int64) - batch.counts)[places]
        group, row = ragged(laid.lens)
        samples = np.frombuffer(step.samples, np.uint8)
        wanted = self.answers.wanted(batch, samples, first_rows[group] + row)
        plan = plan_batch(
            self.state, replace(batch, logit_rows=wanted.rows), single_rows=self.model.single_rows
        )
        write_drafts(plan, first_rows, laid, self._to)
        self._begin_masks(job.epoch, decoding, laid)
        return Verified(plan, forward(self.model, self.state, plan), wanted, names, places)

    def _begin_masks(self, epoch: int, decoding: Decoding, laid: Laid) -> None:
        """Tells the mask source which rows are verified."""
        if self.speculation.masks is not None:
            tokens = torch.cat([decoding.anchors[:, None], self._draft_ids(laid)], 1)
            self.speculation.masks.begin(epoch, decoding.slots, tokens, laid.lens)

    def _draft_ids(self, laid: Laid) -> Tensor:
        """Drafts [n, gamma] int64; zeros, none of them verified, where nothing was drafted."""
        if laid.drafts is not None:
            return laid.drafts.ids
        shape = (laid.lens.size, self.speculation.block)
        return torch.zeros(shape, dtype=torch.int64, device=self.state.device)

    def accept(
        self, epoch: int, decoding: Decoding, laid: Laid, verified: Verified, outcome: Outcome
    ) -> Verdict | None:
        """Which rows stay, and what follows them; None where nothing was verified."""
        masks = self.speculation.masks
        mask = None if masks is None else masks.finish(epoch)
        if not decoding.slots.size:
            return None
        rows = VerifyRows(
            tuple(decoding.slots.tolist()),
            tuple((decoding.lengths + 1).tolist()),
            laid.lens,
            self._draft_ids(laid),
            None if laid.drafts is None else laid.drafts.logits,
        )
        logits = verified.out.logits[: verified.wanted.verified]
        return judge(self.acceptance, logits, rows, mask, decoding.groups.tolist(), outcome)

    def commit(self, decoding: Decoding, verified: Verified, verdict: Verdict | None) -> None:
        """Commits all rows of chunks and the accepted ones of the others; keeps taps and relay tokens."""
        plan, pending = verified.plan, verified.out.pending
        lens, device_lens = plan.batch.counts.astype(np.int64), plan.commit.counts
        if verdict is not None:
            lens[verified.places] = verdict.committed
            places = self._to.int64(verified.places)
            device_lens = device_lens.index_copy(0, places, verdict.counts)
            store_relay(self.state, self._to.int64(decoding.slots), verdict.last)
        commit_step(self.model, self.state, plan, pending, device_lens)
        self.speculation.ring.keep(plan.batch, pending.taps, input_ids(self.state, plan), lens)

    def _broken(self, columns: StepColumns) -> dict[int, str]:
        """Groups whose slots were bound to parameters that can't be used."""
        broken = self.bindings.broken
        if not broken:
            return {}
        return {g: broken[slot] for g, slot in enumerate(columns.slots.tolist()) if slot in broken}
