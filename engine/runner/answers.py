"""From a step's logits to its answer: which logits are needed, the next token of each group, and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.messages import LogprobColumns
from engine.runner.batch import ForwardBatch
from engine.runner.bindings import Bindings
from engine.runner.columns import Upload
from engine.runner.edits import MaskWords
from engine.runner.logprobs import NO_COLUMNS, columns, message, nothing_chosen
from engine.runner.sampling import Chosen, Rows

Int32 = npt.NDArray[np.int32]

BAD_LOGITS = "the logits hold NaN or infinity, or no token is allowed"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logits a step needs: those of verified rows, then of sampled, then of scored ones.

    Row groups are numbered as the batch has them.

    verified  how many rows are verified
    sampled   groups whose last row is sampled
    scored    (group, position) of prompt tokens whose log probability is wanted
    rows      int32, the step row of each
    """

    verified: int
    sampled: tuple[int, ...]
    scored: tuple[tuple[int, int], ...]
    rows: Int32


@dataclass(slots=True)
class Outcome:
    """What became of a step's row groups, numbered as in the RunStep.

    tokens  of each group that emits some
    rows    the logit row of a group's first token; its others follow
    failed  why a group failed
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def drop(self, group: int) -> None:
        """The group emits nothing."""
        self.tokens.pop(group, None)
        self.rows.pop(group, None)

    def columns(self, groups: int) -> tuple[bytes, bytes]:
        """Counts and token ids, as StepDone has them."""
        counts = np.zeros(groups, np.uint8)
        for group, tokens in self.tokens.items():
            counts[group] = len(tokens)
        ids = [token for group in sorted(self.tokens) for token in self.tokens[group]]
        return counts.tobytes(), np.asarray(ids, np.int32).tobytes()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for the sampled groups, on the device.

    slots   int64 [sampled]
    chosen  of each
    errors  why a row's sampling failed
    """

    slots: Tensor
    chosen: Chosen
    errors: Mapping[int, str]

    @property
    def columns(self) -> Tensor:
        """int64 [2, sampled]: tokens, and 1 where they count. `settle` wants it as lists."""
        return torch.stack((self.chosen.tokens, self.chosen.valid.to(torch.int64)))


class Answers:
    """Samples rows of bound slots and reads their log probabilities."""

    def __init__(self, bindings: Bindings, device: torch.device) -> None:
        self.bindings, self.choices = bindings, bindings.choices
        self._to = Upload(device)

    def wanted(
        self,
        batch: ForwardBatch,
        samples: npt.NDArray[np.uint8],
        verified: npt.NDArray[np.integer] | None = None,
    ) -> Wanted:
        """The logits that the step's requests ask for.

        samples   uint8 [B], as in RunStep
        verified  step rows that are verified
        """
        slots = batch.slots.tolist()
        last = (np.cumsum(batch.counts) - 1).tolist()
        broken = self.bindings.broken
        sampled = tuple(g for g, slot in enumerate(slots) if samples[g] and slot not in broken)
        scored: list[tuple[int, int]] = []
        rows: list[int] = [] if verified is None else verified.tolist()
        leading = len(rows)
        rows += [last[group] for group in sampled]
        for group, slot in enumerate(slots) if self.bindings.prompts else ():
            start, count = int(batch.starts[group]), int(batch.counts[group])
            positions = self.bindings.scored(slot, start, count)
            scored += [(group, position + 1) for position in positions]
            first = last[group] - count + 1
            rows += range(first, first + len(positions))
        return Wanted(leading, sampled, tuple(scored), np.asarray(rows, np.int32))

    def draw(self, logits: Tensor, batch: ForwardBatch, wanted: Wanted, mask: MaskWords | None) -> Drawn:
        """Samples the wanted groups, and waits for nothing; the mask is of their rows."""
        slots, ends = batch.slots.tolist(), (batch.starts + batch.counts).tolist()
        rows = Rows(
            tuple(slots[group] for group in wanted.sampled), tuple(ends[group] for group in wanted.sampled)
        )
        first, stop = wanted.verified, wanted.verified + len(wanted.sampled)
        chosen, errors = self._sample(logits[first:stop], rows, mask)
        return Drawn(self.ids(rows.slots), chosen, errors)

    def asked_for(self, wanted: Wanted, slots: Sequence[int]) -> bool:
        """Whether a step on these slots has log probabilities, which are read of tokens that are known."""
        of = self.bindings.parameters.of
        return bool(wanted.scored) or any(of(slots[group]).logprobs >= 0 for group in wanted.sampled)

    def _sample(self, logits: Tensor, rows: Rows, mask: MaskWords | None) -> tuple[Chosen, dict[int, str]]:
        """Sample all rows at once; where that raises, one by one, so that only the rows at fault fail.

        raises  what it raised at once where no row is at fault: logits may be half edited by then
        """
        try:
            return self.choices.sample(logits, rows, mask), {}
        except Exception:
            tokens = torch.zeros(len(rows.slots), dtype=torch.int64, device=logits.device)
            valid = torch.zeros(len(rows.slots), dtype=torch.bool, device=logits.device)
            errors: dict[int, str] = {}
            for row in range(len(rows.slots)):
                try:
                    own = None if mask is None else mask.part(row, row + 1)
                    one = self.choices.sample(logits[row : row + 1], rows.only(row), own)
                    tokens[row : row + 1], valid[row : row + 1] = one.tokens, one.valid
                except Exception as error:
                    errors[row] = f"sampling failed: {error}"
            if not errors:
                raise
            return Chosen(tokens, valid), errors

    def logprobs(
        self, logits: Tensor, slots: Sequence[int], outcome: Outcome, wanted: Wanted, names: Sequence[int]
    ) -> LogprobColumns | None:
        """Logprob columns of emitted and of scored prompt tokens; None where no request asked.

        slots  of the RunStep's groups
        names  the RunStep's number of each of the batch's groups
        """
        of = self.bindings.parameters.of
        emitting = sorted(outcome.tokens)
        asking = [group for group in emitting if of(slots[group]).logprobs >= 0]
        if not asking and not wanted.scored:
            return None
        emitted = [(g, place) for g in emitting for place in range(len(outcome.tokens[g]))]
        output = nothing_chosen(len(emitted))
        if asking:
            asked = [i for i, (g, _) in enumerate(emitted) if of(slots[g]).logprobs >= 0]
            own = [emitted[i] for i in asked]
            index = self.ids([outcome.rows[g] + place for g, place in own])
            tokens = self.ids([outcome.tokens[g][place] for g, place in own])
            tops = [of(slots[g]).logprobs for g, _ in own]
            output = columns(len(emitted), asked, self.choices.logprobs(logits[index], tokens, tops))
        prompt = NO_COLUMNS
        scored = [(names[group], position) for group, position in wanted.scored]
        if scored:
            prompts = self.bindings.prompts
            tokens = self.ids([int(prompts[slots[group]][position]) for group, position in scored])
            tops = [of(slots[group]).prompt_logprobs for group, _ in scored]
            found = self.choices.logprobs(logits[wanted.verified + len(wanted.sampled) :], tokens, tops)
            prompt = columns(len(scored), range(len(scored)), found)
        return message(output, prompt, scored)

    def ids(self, values: Sequence[int]) -> Tensor:
        """int64 [n] on the device."""
        return self._to.int64(np.array(values, np.int64))


def settle(
    drawn: Drawn, columns: Sequence[Sequence[int]], wanted: Wanted, names: Sequence[int], outcome: Outcome
) -> None:
    """Adds what became of the sampled groups to `outcome`.

    columns  of `Drawn.columns`, on the host
    names    the RunStep's number of each of the batch's groups
    """
    tokens, valid = columns
    for row, group in enumerate(wanted.sampled):
        if row in drawn.errors or not valid[row]:
            outcome.failed[names[group]] = drawn.errors.get(row, BAD_LOGITS)
        else:
            outcome.tokens[names[group]] = [tokens[row]]
            outcome.rows[names[group]] = wanted.verified + row
