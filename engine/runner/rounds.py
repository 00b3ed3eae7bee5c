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
from dataclasses import replace

import numpy as np

from engine.actors.round import (
    Accepted,
    Begin,
    Committed,
    Drafted,
    Failed,
    LaidOut,
    MaskReady,
    Verified,
)
from engine.errors import Unexpected
from engine.messages import RunStep, StepDone
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.answers import Answers, Outcome, settle
from engine.runner.batch import build_batch
from engine.runner.columns import Int, Upload
from engine.runner.decoding import (
    anchors_of,
    check_agreed,
    decoding_groups,
    drafted_columns,
    laid_step,
    read_columns,
    write_drafts,
)
from engine.runner.forward import commit_step, input_ids, store_relay
from engine.runner.graph_path import TargetPath
from engine.runner.masking import MaskSource, StepMasks
from engine.runner.plan import check_generations
from engine.runner.round_masks import begin_masks
from engine.runner.speculative import Drafts, Speculation
from engine.runner.stages import Decoding, Kept, Laid, StepColumns, Target
from engine.runner.taps import ragged
from engine.runner.verdicts import judge


class Rounds:
    """Executes the steps of a runner that drafts; the seams between its stages are its methods."""

    def __init__(
        self,
        path: TargetPath,
        answers: Answers,
        speculation: Speculation,
        masks: MaskSource | None,
    ) -> None:
        self.path, self.speculation, self.masks = path, speculation, masks
        self.model, self.state = path.model, path.state
        self.round = speculation.round
        self.answers, self.bindings = answers, answers.bindings
        self._to = Upload(self.state.device)

    def execute(self, job: RunStep, began: float) -> StepDone:
        """Runs a step whose binds and pages are in. raises PageAccounting, ShapeMismatch"""
        try:
            return self._execute(job, began)
        except BaseException:
            if not self.round.ended:
                self.round.receive(Failed())
            raise

    def _execute(self, job: RunStep, began: float) -> StepDone:
        columns = read_columns(job, self.model.groups.dp.rank)
        outcome = Outcome(failed=self._broken(columns))
        decoding = self.begin(job.epoch, columns, outcome)
        laid = self.layout(job, columns, decoding, self.draft(columns, decoding, job.budget))
        drafted_at = time.perf_counter()
        target = self.verify(job, columns, decoding, laid)
        verified_at = time.perf_counter()
        kept = self.accept(job.epoch, columns, decoding, laid, target, outcome)
        self.commit(target, kept)
        ended_at = time.perf_counter()
        slots = columns.slots.tolist()
        counts, token_ids = outcome.columns(len(slots))
        return StepDone(
            epoch=job.epoch,
            counts=counts,
            token_ids=token_ids,
            failed=tuple(sorted(outcome.failed.items())),
            logprobs=self.answers.logprobs(
                target.out.logits, slots, outcome, target.wanted, target.names.tolist()
            ),
            seconds=time.perf_counter() - began,
            ended=kept.ended,
            **drafted_columns(columns, decoding, laid, self.round) if job.verify else {},
            phases=(drafted_at - began, verified_at - drafted_at, ended_at - verified_at),
        )

    def _broken(self, columns: StepColumns) -> dict[int, str]:
        """Groups whose slots were bound to parameters that can't be used."""
        broken = self.bindings.broken
        if not broken:
            return {}
        return {g: broken[slot] for g, slot in enumerate(columns.slots.tolist()) if slot in broken}

    def begin(self, epoch: int, columns: StepColumns, outcome: Outcome) -> Decoding:
        """The decoding groups; a group whose slot is broken verifies nothing."""
        caps = columns.verify
        if outcome.failed:
            caps = caps.copy()
            caps[list(outcome.failed)] = 0
        slots, generations = columns.slots, columns.generations
        try:
            self.round.receive(Begin(epoch, slots, generations, columns.chunks, caps, columns.agreed))
        except Unexpected:
            check_generations(self.state, slots, generations)
            raise
        return decoding_groups(columns, self.round)

    def draft(self, columns: StepColumns, decoding: Decoding, budget: int) -> Drafts | None:
        """Injects and drafts; None where the budget is 0 or no group may verify a draft."""
        if not budget or not (decoding.caps > 1).any():
            return None
        guide = None
        if self.masks is not None:
            guide = self.masks.guide(self.round.epoch, decoding.slots, decoding.lengths + 1)
        anchors = anchors_of(columns, decoding, self.state, self._to)
        self.speculation.inject(decoding.slots, anchors)
        slots = decoding.slots.tolist()
        choose = self.bindings.choices.choose(slots, (decoding.lengths + 1).tolist())
        sampled = any(self.bindings.parameters.of(slot).by_odds for slot in slots)
        drafts = self.speculation.draft(decoding.slots, anchors, choose, guide, keep_logits=sampled)
        self.round.receive(Drafted())
        return drafts

    def layout(self, job: RunStep, columns: StepColumns, decoding: Decoding, drafts: Drafts | None) -> Laid:
        """How many rows each group runs."""
        if drafts is None:
            ones = np.ones_like(decoding.caps)
            laid = Laid(None, ones, ones)
        else:
            laid = Laid(drafts, *self.speculation.layout(drafts, decoding.caps, job.budget))
        check_agreed(job.epoch, columns, laid)
        lens = columns.chunks.copy()
        lens[decoding.groups] = laid.lens
        self.round.receive(LaidOut(lens))
        return laid

    def verify(self, job: RunStep, columns: StepColumns, decoding: Decoding, laid: Laid) -> Target:
        """The target forward over all groups; without drafts, decoding ones are sampled as chunks are."""
        step, names = laid_step(job, columns, decoding, laid)
        batch = build_batch(
            step, rank=self.model.groups.dp.rank, row_tile=self.model.row_tile,
            idle_runs=self.model.needs_every_rank, every_logit=False, taps=self.speculation.drafter.taps,
            graph_key="", tbo_boundary=-1, cp_segments=(),
        )  # fmt: skip
        places = first_rows = judged = np.zeros(0, np.int64)
        if laid.drafts is not None:
            places = np.searchsorted(names, decoding.groups)
            first_rows = (np.cumsum(batch.counts, dtype=np.int64) - batch.counts)[places]
            group, row = ragged(laid.lens)
            judged = first_rows[group] + row
        wanted = self.answers.wanted(batch, np.frombuffer(step.samples, np.uint8), judged)
        plan = self.path.plan(replace(batch, logit_rows=wanted.rows), job.bucket)
        if laid.drafts is not None:
            write_drafts(plan, first_rows, laid.rows, laid.drafts.ids, self._to)
        masks = StepMasks()
        if self.masks is not None and self.masks.constrained(columns.slots).size:
            anchors = anchors_of(columns, decoding, self.state, self._to)
            sampled = names[list(wanted.sampled)]
            masks = begin_masks(self.masks, self.round, columns, decoding, laid, sampled, anchors)
        out = self.path.run(plan)
        self.round.receive(Verified())
        return Target(plan, out, wanted, names, places, masks)

    def accept(
        self,
        epoch: int,
        columns: StepColumns,
        decoding: Decoding,
        laid: Laid,
        target: Target,
        outcome: Outcome,
    ) -> Kept:
        """Which rows stay, and what follows them; adds what became of the groups to `outcome`."""
        kept, lens, failed = columns.chunks.copy(), target.plan.commit.counts, None
        kept[decoding.groups] = laid.lens
        relays, drawn, masks, wanted = [], None, target.masks, target.wanted
        logits, groups = target.out.logits, decoding.groups
        masks.finish()
        if masks.found is not None:
            self.round.receive(MaskReady(epoch, masks.found.lengths))
        if wanted.sampled:
            mask = masks.of(wanted.verified, len(wanted.sampled))
            drawn = self.answers.draw(logits, target.plan.batch, wanted, mask)
        if laid.drafts is not None:
            rows = _verified(decoding, laid.drafts, laid.lens)
            mask, most = masks.of(0, wanted.verified), masks.most(groups.size)
            own = logits[: wanted.verified]
            verdict = judge(self.bindings.choices, own, rows, groups.tolist(), outcome, most, mask)
            kept[groups] = verdict.committed
            judged = laid.lens if most is None else np.minimum(laid.lens, most)
            self.speculation.correction.note(judged - 1, verdict.committed - 1)
            failed = groups[verdict.committed == 0]
            lens = lens.index_copy(0, self._to.int64(target.places), verdict.counts)
            relays.append((self._to.int64(decoding.slots), verdict.last))
        if drawn is not None:
            settle(drawn, drawn.columns.tolist(), wanted, target.names.tolist(), outcome)
            relays.append((drawn.slots, drawn.chosen.tokens))
        over = masks.over
        if over.size and laid.drafts is None:
            for group in over.tolist():
                outcome.drop(group)
            kept[over] = 0
            lens = lens.index_fill(0, self._to.int64(np.searchsorted(target.names, over)), 0)
        self.round.receive(Accepted(kept, failed))
        return Kept(kept, failed, lens, tuple(relays), masks.retain(outcome, columns.slots.size))

    def commit(self, target: Target, kept: Kept) -> None:
        """Commits what is kept; its taps and the next anchors stay on the device."""
        plan, pending = target.plan, target.out.pending
        commit_step(self.model, self.state, plan, pending, kept.lens)
        # Before relay tokens change, from which they come.
        tokens = input_ids(self.state, plan) if self.speculation.drafter.needs_next_tokens else None
        self.speculation.ring.keep(plan.batch, pending.taps, tokens, kept.rows[target.names])
        for slots, anchors in kept.relays:
            store_relay(self.state, slots, anchors)
        self.round.receive(Committed())


def _verified(decoding: Decoding, drafts: Drafts, lens: Int) -> VerifyRows:
    """The first lens[i] rows of each group, int64 [n], and its drafts."""
    slots, positions = tuple(decoding.slots.tolist()), tuple((decoding.lengths + 1).tolist())
    return VerifyRows(slots, positions, lens, drafts.ids, drafts.logits, drafts.stats)
