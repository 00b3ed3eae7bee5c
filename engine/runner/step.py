"""One RunStep on the device thread: bind, plan, forward, commit, sample, relay, and results to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.actors.round import MASK_SLOTS
from engine.errors import ShapeMismatch
from engine.kernel_sets import choices as choices_beside
from engine.memory.pools import KVState
from engine.messages import RunStep, SlotBind, StepDone
from engine.model.model import DeepseekV4
from engine.runner.answers import Answers, Outcome, Wanted
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.bindings import Bindings
from engine.runner.choices import Choices
from engine.runner.forward import commit_step, store_relay
from engine.runner.graph_path import TargetPath
from engine.runner.masking import MaskGroups, MaskSource, StepMasks, no_drafts
from engine.runner.rounds import Rounds
from engine.runner.speculative import Speculation


class StepRunner:
    """Owns the model, the cache and the sampling state of one rank; lives on the device thread.

    model        and state are of one device and geometry
    eos_ids      what min_new_tokens forbids besides a request's own stop tokens
    speculation  what drafts; None: steps with `verify` are refused
    masks        of constrained requests; None: each of those fails
    choices      of tokens, for these slots; None: as the model's kernel set does it
    """

    def __init__(
        self,
        model: DeepseekV4,
        state: KVState,
        eos_ids: Sequence[int],
        speculation: Speculation | None = None,
        masks: MaskSource | None = None,
        choices: Choices | None = None,
    ) -> None:
        self.model = model
        self.state = state
        self.choices = choices or choices_beside(
            model.ops, state.slots, model.config.vocab_size, eos_ids, state.device
        )
        self.bindings = Bindings(self.choices)
        self.parameters = self.bindings.parameters
        self.speculation, self.masks = speculation, masks
        self.path = TargetPath(model, state)
        self._answers = Answers(self.bindings, state.device)
        self._rounds = None
        if speculation is not None:
            self._rounds = Rounds(self.path, self._answers, speculation, masks)

    @torch.inference_mode()
    def execute(self, job: RunStep) -> StepDone:
        """Runs a step and waits for its results.

        A request whose parameters or logits are bad fails alone, in the answer's `failed`; any other error is
        raised, and ends the rank. raises ShapeMismatch for a step with `verify` where nothing drafts
        """
        began = time.perf_counter()
        for bind in job.binds:
            self._bind(bind)
        self.state.map_pages(np.frombuffer(job.pages, np.int32).reshape(-1, 4))
        if self._rounds is not None:
            return self._rounds.execute(job, began)
        if job.verify:
            raise ShapeMismatch(f"step {job.epoch} verifies drafts, but no draft was loaded")
        return self._plain(job, began)

    def _bind(self, bind: SlotBind) -> None:
        self.bindings.bind(self.state, bind)
        if self.speculation is not None:
            self.speculation.bind(bind)
        fault = "no grammar can be followed here" if bind.constrained else ""
        if self.masks is not None:
            fault = self.masks.bind(bind)
        if fault:
            self.bindings.broken.setdefault(bind.slot, fault)

    def _plain(self, job: RunStep, began: float) -> StepDone:
        """A step that samples one token of each group."""
        batch = build_batch(
            job, rank=self.model.groups.dp.rank, row_tile=self.model.row_tile,
            idle_runs=self.model.needs_every_rank, every_logit=False, taps=(), graph_key="",
            tbo_boundary=-1, cp_segments=(),
        )  # fmt: skip
        wanted = self._answers.wanted(batch, np.frombuffer(job.samples, np.uint8))
        plan = self.path.plan(replace(batch, logit_rows=wanted.rows), job.bucket)
        masks = self._begin_masks(job.epoch, batch, wanted)
        out = self.path.run(plan)
        commit_step(self.model, self.state, plan, out.pending)
        slots, names = batch.slots.tolist(), range(batch.slots.size)
        broken = self.bindings.broken
        outcome = Outcome(failed={g: broken[slot] for g, slot in enumerate(slots) if slot in broken})
        if wanted.sampled:
            logits = masks.applied(out.logits, len(wanted.sampled))
            store_relay(self.state, *self._answers.sample(logits, batch, wanted, names, outcome))
        ended = masks.retain(outcome, len(slots))
        counts, token_ids = outcome.columns(len(slots))
        return StepDone(
            epoch=job.epoch,
            counts=counts,
            token_ids=token_ids,
            failed=tuple(sorted(outcome.failed.items())),
            logprobs=self._answers.logprobs(out.logits, slots, outcome, wanted, names),
            seconds=time.perf_counter() - began,
            ended=ended,
        )

    def _begin_masks(self, epoch: int, batch: ForwardBatch, wanted: Wanted) -> StepMasks:
        """Asks for masks of the rows that are sampled."""
        if self.masks is None or not wanted.sampled:
            return StepMasks()
        names = np.array(wanted.sampled, np.int64)
        slots = batch.slots[names].astype(np.int64)
        if not self.masks.constrained(slots).size:
            return StepMasks()
        anchors = (batch.starts + batch.counts)[names].astype(np.int64)
        mask_slot = epoch % MASK_SLOTS
        self.masks.wait_read(mask_slot)
        groups = MaskGroups(slots, anchors, np.ones_like(names), no_drafts(self.state.device))
        return StepMasks(self.masks, epoch, mask_slot, names, groups)
