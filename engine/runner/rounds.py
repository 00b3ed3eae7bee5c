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

from engine.actors.round import Accepted, Begin, Committed, Drafted, Failed, LaidOut, Verified
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
    drafted_columns,
    laid_step,
    read_columns,
    write_drafts,
)
from engine.runner.forward import commit_step, forward, input_ids, store_relay
from engine.runner.plan import Plan, plan_batch
from engine.runner.speculative import Drafts, Speculation
from engine.runner.taps import ragged
from engine.runner.verdicts import Verdict, judge


@dataclass(frozen=True, slots=True)
class Target:
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
        self.round = speculation.round
        self.answers, self.bindings = answers, answers.bindings
        self.acceptance = Acceptance(self.bindings.parameters, self.bindings.counts)
        self._to = Upload(state.device)

    def execute(self, job: RunStep, began: float) -> StepDone:
        """Runs a step whose binds and pages are in. raises PageAccounting, ShapeMismatch"""
        try:
            return self._execute(job, began)
        except BaseException:
            if not self.round.ended:
                self.round.receive(Failed())
            raise

    def _execute(self, job: RunStep, began: float) -> StepDone:
        columns = read_columns(job, self.state)
        outcome = Outcome(failed=self._broken(columns))
        decoding = self.begin(job, columns, outcome)
        laid = self.layout(columns, decoding, self.draft(decoding, job.budget), job.budget)
        drafted_at = time.perf_counter()
        target = self.verify(job, columns, decoding, laid)
        verified_at = time.perf_counter()
        verdict = self.accept(job.epoch, decoding, laid, target, outcome)
        self.commit(columns, decoding, target, verdict)
        slots = columns.slots.tolist()
        names, logits = target.names.tolist(), target.out.logits
        if target.wanted.sampled:
            relays = self.answers.sample(logits, target.plan.batch, target.wanted, names, outcome)
            store_relay(self.state, *relays)
        counts, token_ids = outcome.columns(len(slots))
        ended_at = time.perf_counter()
        return StepDone(
            epoch=job.epoch,
            counts=counts,
            token_ids=token_ids,
            failed=tuple(sorted(outcome.failed.items())),
            logprobs=self.answers.logprobs(logits, slots, outcome, target.wanted, names),
            seconds=time.perf_counter() - began,
            **drafted_columns(columns, decoding, laid, self.round) if job.verify else {},
            phases=(drafted_at - began, verified_at - drafted_at, ended_at - verified_at),
        )

    def begin(self, job: RunStep, columns: StepColumns, outcome: Outcome) -> Decoding:
        """The decoding groups; a group whose slot is broken verifies nothing."""
        caps = columns.verify
        if outcome.failed:
            caps = caps.copy()
            caps[list(outcome.failed)] = 0
        rows = job.ranks[self.model.groups.dp.rank][1] if job.ranks else int((columns.chunks + caps).sum())
        generations = np.frombuffer(job.generations, np.int32)
        self.round.receive(Begin(job.epoch, columns.slots, generations, columns.chunks, caps, rows))
        return decoding_groups(columns, self.round, self.state)

    def draft(self, decoding: Decoding, budget: int) -> Drafts | None:
        """Injects and drafts; None where the budget is 0 or no group may verify a draft."""
        if not budget or not (decoding.caps > 1).any():
            return None
        self.speculation.inject(decoding.slots, decoding.anchors)
        slots = tuple(decoding.slots.tolist())
        choose = self.acceptance.choose(slots, tuple((decoding.lengths + 1).tolist()))
        sampled = any(not self.bindings.parameters.of(slot).greedy for slot in slots)
        drafts = self.speculation.draft(decoding.slots, decoding.anchors, choose, keep_logits=sampled)
        self.round.receive(Drafted())
        return drafts

    def layout(self, columns: StepColumns, decoding: Decoding, drafts: Drafts | None, budget: int) -> Laid:
        """How many rows each group runs."""
        if drafts is None:
            ones = np.ones_like(decoding.caps)
            laid = Laid(None, ones, ones)
        else:
            laid = Laid(drafts, *self.speculation.layout(drafts, decoding.caps, budget))
        lens = columns.chunks.copy()
        lens[decoding.groups] = laid.lens
        self.round.receive(LaidOut(lens))
        return laid

    def verify(self, job: RunStep, columns: StepColumns, decoding: Decoding, laid: Laid) -> Target:
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
        out = forward(self.model, self.state, plan)
        self.round.receive(Verified())
        return Target(plan, out, wanted, names, places)

    def _begin_masks(self, epoch: int, decoding: Decoding, laid: Laid) -> None:
        """Tells the mask source which rows are target."""
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
        self, epoch: int, decoding: Decoding, laid: Laid, target: Target, outcome: Outcome
    ) -> Verdict | None:
        """Which rows stay, and what follows them; None where nothing was target."""
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
        logits = target.out.logits[: target.wanted.verified]
        return judge(self.acceptance, logits, rows, mask, decoding.groups.tolist(), outcome)

    def commit(
        self, columns: StepColumns, decoding: Decoding, target: Target, verdict: Verdict | None
    ) -> None:
        """Commits all rows of chunks and the accepted ones of the others; keeps taps and relay tokens."""
        plan, pending = target.plan, target.out.pending
        # Before relay tokens change, from which they come.
        tokens = input_ids(self.state, plan) if self.speculation.drafter.needs_next_tokens else None
        kept, device_lens = columns.chunks.copy(), plan.commit.counts
        failed = None
        if verdict is not None:
            kept[decoding.groups] = verdict.committed
            failed = decoding.groups[verdict.committed == 0]
            places = self._to.int64(target.places)
            device_lens = device_lens.index_copy(0, places, verdict.counts)
            store_relay(self.state, self._to.int64(decoding.slots), verdict.last)
        self.round.receive(Accepted(kept, failed))
        commit_step(self.model, self.state, plan, pending, device_lens)
        self.speculation.ring.keep(plan.batch, pending.taps, tokens, kept[target.names])
        self.round.receive(Committed())

    def _broken(self, columns: StepColumns) -> dict[int, str]:
        """Groups whose slots were bound to parameters that can't be used."""
        broken = self.bindings.broken
        if not broken:
            return {}
        return {g: broken[slot] for g, slot in enumerate(columns.slots.tolist()) if slot in broken}
