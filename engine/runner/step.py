"""One RunStep on the device thread: bind, plan, forward, commit, sample, relay, and results to the host.

On a device a plain step is launched and no more: its results arrive while the next one, whose tokens are
relayed on the device, is planned and launched. A step whose next one needs what came of it is waited for:
with drafts, as plans need committed lengths; with grammars, as masks need the tokens; with log probabilities,
as they are read of known tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.actors.round import MASK_SLOTS
from engine.errors import ShapeMismatch
from engine.kernel_sets import choices as choices_beside
from engine.memory.pools import KVState
from engine.messages import LogprobColumns, RunStep, SlotBind, StepDone
from engine.model.model import DeepseekV4
from engine.runner.answers import Answers, Drawn, Outcome, Wanted, settle
from engine.runner.arrivals import Arrival, Arrivals
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.bindings import Bindings
from engine.runner.choices import Choices
from engine.runner.forward import commit_step, store_relay
from engine.runner.graph_path import TargetPath
from engine.runner.masking import MaskGroups, MaskSource, StepMasks, no_drafts
from engine.runner.rounds import Rounds
from engine.runner.speculative import Speculation


def waited(step: StepDone | Callable[[], StepDone]) -> StepDone:
    """The results of a step that was launched, which may have to be waited for."""
    return step if isinstance(step, StepDone) else step()


class StepRunner:
    """Owns the model, the cache and the sampling state of one rank; lives on the device thread.

    model        and state are of one device and geometry
    eos_ids      what min_new_tokens forbids besides a request's own stop tokens
    speculation  what drafts; None: steps with `verify` are refused
    masks        of constrained requests; None: each of those fails
    choices      of tokens, for these slots; None: as the model's kernel set does it

    overlaps     plain steps are launched, and their results waited for elsewhere
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
        self.overlaps = state.device.type == "cuda"
        self._arrivals = Arrivals(state.device)
        self._last_end_s = 0.0
        self._rounds = None
        if speculation is not None:
            self._rounds = Rounds(self.path, self._answers, speculation, masks)

    def execute(self, job: RunStep) -> StepDone:
        """Runs a step and waits for its results.

        A request whose parameters or logits are bad fails alone, in the answer's `failed`; any other error is
        raised, and ends the rank. raises ShapeMismatch for a step with `verify` where nothing drafts
        """
        return waited(self.launch(job))

    @torch.inference_mode()
    def launch(self, job: RunStep) -> StepDone | Callable[[], StepDone]:
        """As `execute`; where steps overlap, what waits for the results, once and on any thread, in order.

        The next step may be launched before it is called, and not the one after that.
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

    def _plain(self, job: RunStep, began: float) -> StepDone | Callable[[], StepDone]:
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
        drawn = None
        if wanted.sampled:
            masks.finish()
            drawn = self._answers.draw(out.logits, batch, wanted, masks.of(0, len(wanted.sampled)))
            store_relay(self.state, drawn.slots, drawn.chosen.tokens)
        if self.overlaps and not masks.groups.size and not self._answers.asked_for(wanted, slots):
            arrival = self._bring(drawn)
            return lambda: self._arrived(job.epoch, arrival, drawn, wanted, outcome, len(slots), began)
        if drawn is not None:
            settle(drawn, drawn.columns.tolist(), wanted, names, outcome)
        ended = masks.retain(outcome, len(slots))
        logprobs = self._answers.logprobs(out.logits, slots, outcome, wanted, names)
        return self._done(job.epoch, outcome, len(slots), began, logprobs, ended)

    def _bring(self, drawn: Drawn | None) -> Arrival:
        """What was drawn, and then what kernels met."""
        told = [] if drawn is None else [drawn.columns]
        faults = self.model.ops.faults
        return self._arrivals.bring(told if faults is None else [*told, faults])

    def _arrived(
        self,
        epoch: int,
        arrival: Arrival,
        drawn: Drawn | None,
        wanted: Wanted,
        outcome: Outcome,
        groups: int,
        began: float,
    ) -> StepDone:
        """Waits for a step's results. raises PageAccounting where kernels met bad indices"""
        told = arrival.wait()
        if self.model.ops.faults is not None and told[-1].any():
            self.model.ops.check()
        if drawn is not None:
            settle(drawn, told[0].tolist(), wanted, range(groups), outcome)
        return self._done(epoch, outcome, groups, began)

    def _done(
        self,
        epoch: int,
        outcome: Outcome,
        groups: int,
        began: float,
        logprobs: LogprobColumns | None = None,
        ended: bytes = b"",
    ) -> StepDone:
        counts, token_ids = outcome.columns(groups)
        # A step that was launched behind another one begins with that one's end.
        began, now = max(began, self._last_end_s), time.perf_counter()
        # Two threads note ends, so it isn't read again.
        self._last_end_s = now
        return StepDone(
            epoch=epoch,
            counts=counts,
            token_ids=token_ids,
            failed=tuple(sorted(outcome.failed.items())),
            logprobs=logprobs,
            seconds=now - began,
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
