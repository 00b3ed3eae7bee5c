"""One RunStep on the device thread: bind, plan, forward, commit, sample, relay, and results to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import BadRequest
from engine.memory.pools import KVState
from engine.messages import LogprobColumns, RunStep, SlotBind, StepDone
from engine.model.model import DeepseekV4
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.forward import commit_step, forward, store_relay
from engine.runner.logprobs import NO_COLUMNS, columns, message, nothing_chosen, token_logprobs
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import TokenCounts
from engine.runner.plan import plan_batch
from engine.runner.sampling import Chosen, Rows, Sampler

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logits a step needs. Row group numbers count the step's requests.

    sampled  groups whose last row is sampled; their logits come first, in this order
    scored   (group, position) of prompt tokens whose log probability is wanted; their logits come next
    rows     int32, the step row of each
    """

    sampled: tuple[int, ...]
    scored: tuple[tuple[int, int], ...]
    rows: Int32


class StepRunner:
    """Owns the model, the cache and the sampling state of one rank; lives on the device thread.

    model    and state are of one device and geometry
    eos_ids  what min_new_tokens forbids besides a request's own stop tokens
    """

    def __init__(self, model: DeepseekV4, state: KVState, eos_ids: Sequence[int]) -> None:
        vocab_size = model.config.vocab_size
        self.model = model
        self.state = state
        self.parameters = SlotParameters(state.slots, vocab_size, eos_ids, state.device)
        self.counts = TokenCounts(state.slots, vocab_size, state.device)
        self.sampler = Sampler(self.parameters, self.counts)
        self._prompts: dict[int, Int32] = {}
        self._broken: dict[int, str] = {}

    @torch.inference_mode()
    def execute(self, job: RunStep) -> StepDone:
        """Runs a step and waits for its results.

        A request whose parameters or logits are bad fails alone, in the answer's `failed`; any other error is
        raised, and ends the rank.
        """
        began = time.perf_counter()
        for bind in job.binds:
            self._bind(bind)
        self.state.map_pages(np.frombuffer(job.pages, np.int32).reshape(-1, 4))
        batch = build_batch(
            job, rank=self.model.groups.dp.rank, row_tile=self.model.row_tile,
            idle_runs=self.model.needs_every_rank, every_logit=False, taps=(), graph_key="",
            tbo_boundary=-1, cp_segments=(),
        )  # fmt: skip
        wanted = self._wanted(batch, np.frombuffer(job.samples, np.uint8))
        plan = plan_batch(
            self.state, replace(batch, logit_rows=wanted.rows), single_rows=self.model.single_rows
        )
        out = forward(self.model, self.state, plan)
        commit_step(self.model, self.state, plan, out.pending)
        return self._finish(job.epoch, batch, wanted, out.logits, began)

    def _bind(self, bind: SlotBind) -> None:
        """Bind a slot; parameters that can't be bound break this request alone."""
        self.state.bind(bind.slot, bind.generation)
        self._prompts.pop(bind.slot, None)
        self._broken.pop(bind.slot, None)
        try:
            self.parameters.bind(bind)
            if self.parameters.of(bind.slot).penalised:
                self.counts.bind(bind.slot, bind.prompt, bind.prompt_tokens)
            if bind.sampling.prompt_logprobs >= 0:
                prompt = np.frombuffer(bind.prompt, np.int32)[: bind.prompt_tokens]
                if len(prompt) < bind.prompt_tokens:
                    raise BadRequest(f"prompt logprobs need {bind.prompt_tokens} tokens, {len(prompt)} came")
                self._prompts[bind.slot] = prompt
        except Exception as error:
            self._broken[bind.slot] = str(error)

    def _wanted(self, batch: ForwardBatch, samples: npt.NDArray[np.uint8]) -> Wanted:
        """The logits that the step's requests ask for."""
        slots = batch.slots.tolist()
        last = (np.cumsum(batch.counts) - 1).tolist()
        sampled = tuple(g for g, slot in enumerate(slots) if samples[g] and slot not in self._broken)
        scored: list[tuple[int, int]] = []
        rows = [last[group] for group in sampled]
        for group, slot in enumerate(slots):
            if slot in self._prompts and slot not in self._broken:
                start, count = int(batch.starts[group]), int(batch.counts[group])
                stop = min(start + count, len(self._prompts[slot]) - 1)
                scored += [(group, position + 1) for position in range(start, stop)]
                first = last[group] - count + 1
                rows += range(first, first + max(stop - start, 0))
        return Wanted(sampled, tuple(scored), np.asarray(rows, np.int32))

    def _finish(
        self, epoch: int, batch: ForwardBatch, wanted: Wanted, logits: Tensor, began: float
    ) -> StepDone:
        """Sample, keep relay tokens on the device, and bring everything to the host."""
        slots = batch.slots.tolist()
        failed = {group: self._broken[slot] for group, slot in enumerate(slots) if slot in self._broken}
        positions = (batch.starts + batch.counts).tolist()
        rows = Rows(
            tuple(slots[group] for group in wanted.sampled),
            tuple(positions[group] for group in wanted.sampled),
        )
        own = logits[: len(wanted.sampled)]
        emitted: list[int] = []
        tokens = torch.empty(0, dtype=torch.int64, device=self.state.device)
        if wanted.sampled:
            chosen, errors = self._sample(own, rows)
            store_relay(self.state, self._ids(rows.slots), chosen.tokens)
            tokens = chosen.tokens
            valid = chosen.valid.tolist()
            for row, group in enumerate(wanted.sampled):
                if row in errors:
                    failed[group] = errors[row]
                elif valid[row]:
                    emitted.append(row)
                else:
                    failed[group] = "the logits hold NaN or infinity, or no token is allowed"
        counts = np.zeros(len(slots), np.uint8)
        counts[[wanted.sampled[row] for row in emitted]] = 1
        return StepDone(
            epoch=epoch,
            counts=counts.tobytes(),
            token_ids=tokens.cpu().numpy()[emitted].astype(np.int32).tobytes(),
            failed=tuple(sorted(failed.items())),
            logprobs=self._logprobs(logits, tokens, rows, emitted, wanted, slots),
            seconds=time.perf_counter() - began,
        )

    def _sample(self, logits: Tensor, rows: Rows) -> tuple[Chosen, dict[int, str]]:
        """Sample all rows at once; where that raises, one by one, so that only the rows at fault fail."""
        try:
            return self.sampler.sample(logits, rows), {}
        except Exception:
            tokens = torch.zeros(len(rows.slots), dtype=torch.int64, device=logits.device)
            valid = torch.zeros(len(rows.slots), dtype=torch.bool, device=logits.device)
            errors: dict[int, str] = {}
            for row in range(len(rows.slots)):
                try:
                    one = self.sampler.sample(logits[row : row + 1], rows.only(row))
                    tokens[row : row + 1], valid[row : row + 1] = one.tokens, one.valid
                except Exception as error:
                    errors[row] = f"sampling failed: {error}"
            return Chosen(tokens, valid), errors

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: Rows, emitted: list[int], wanted: Wanted, slots: list[int]
    ) -> LogprobColumns | None:
        """Logprob columns of emitted and of scored prompt tokens; None where no row asked."""
        asked = [i for i, row in enumerate(emitted) if self.parameters.of(rows.slots[row]).logprobs >= 0]
        if not asked and not wanted.scored:
            return None
        output = nothing_chosen(len(emitted))
        if asked:
            index = self._ids([emitted[i] for i in asked])
            tops = [self.parameters.of(rows.slots[emitted[i]]).logprobs for i in asked]
            output = columns(len(emitted), asked, token_logprobs(logits[index], tokens[index], tops))
        prompt = NO_COLUMNS
        if wanted.scored:
            scored = [int(self._prompts[slots[group]][position]) for group, position in wanted.scored]
            tops = [self.parameters.of(slots[group]).prompt_logprobs for group, _ in wanted.scored]
            found = token_logprobs(logits[len(wanted.sampled) :], self._ids(scored), tops)
            prompt = columns(len(scored), range(len(scored)), found)
        return message(output, prompt, wanted.scored)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.state.device)
