"""Lossless verification of drafted tokens: which are accepted, and the token that follows them.

Row i of a group judges draft i+1. With p the row's distribution after all processors and q what the draft
was drawn from, the draft d is accepted with probability min(1, p(d) / q(d)). The first one that isn't is
replaced by a draw from what p has more than q. Where all are accepted, the last row's p gives one more token,
drawn with the number that plain decoding would take at that position. So tokens follow p, whatever q is and
however many rows are verified. A greedy row accepts its argmax alone.

How many rows are verified depends on what else runs, and with it the draw that a token comes from. But a
request that gave its seed is promised the same text again: its row draws what plain decoding would draw, and
accepts that token alone. Its drafts are drawn in the same way, so that they often are that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runner.acceptance_layout import Layout, VerifyRows
from engine.runner.acceptance_odds import Judged, Odds, Trials
from engine.runner.draft_choice import DraftChoice
from engine.runner.edits import GrammarMask, Groups, MaskWords, edit
from engine.runner.filters import greatest
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import TokenCounts
from engine.runner.sampling import Rows, Sampler
from engine.runner.tempering import Int, Tempering


@dataclass(frozen=True, slots=True)
class Accepted:
    """Result of one call, on the device.

    tokens  int64 [B, gamma + 1], the tokens that each group emits, then zeros
    counts  int64 [B], how many: accepted drafts and one more; 0 without rows, and where the group failed
    valid   bool [B]; False where a row holds NaN or infinity, or nothing is allowed at the last token
    """

    tokens: Tensor
    counts: Tensor
    valid: Tensor


class Acceptance:
    """Verifies drafts of slots; owns nothing but references to the slots' parameters and counts."""

    def __init__(self, parameters: SlotParameters, counts: TokenCounts) -> None:
        self.parameters = parameters
        self.counts = counts
        self._sampler = Sampler(parameters, counts)
        self._odds = Odds(parameters)
        self._tempering = Tempering(parameters.vocab_size, parameters.floats.device)

    def accept(self, logits: Tensor, rows: VerifyRows, mask: GrammarMask | None = None) -> Accepted:
        """Judge all groups; the counts of penalised slots grow by what they emit.

        Waits once for the device, for the counts, where a group samples or is penalised; else never.

        logits  float32 [M, V], group by group; not changed
        raises  BadRequest where a slot isn't bound, ShapeMismatch where the columns disagree
        """
        layout = Layout(rows, logits)
        features = [self.parameters.of(slot) for slot in rows.slots]
        groups = Groups(rows.slots, rows.positions, layout.widths.tolist(), features)
        if isinstance(mask, MaskWords) and groups.favoured:
            edited, (largest, favourite) = logits, greatest(logits, mask)
        else:
            edited = edit(self.parameters, self.counts, logits, groups, mask, rows.draft_ids)
            largest, favourite = greatest(edited)
        judged = Judged(edited, rows, layout, features)
        self._repeat(judged, favourite)
        best, choice = layout.grid(largest, 0), layout.grid(favourite, 0)
        passed = choice[:, :-1] == rows.draft_ids
        sampled, trials = judged.sampled(), None
        if sampled.size:
            trials = self._odds.test(judged, sampled)
            passed[self._tempering.index(sampled)] = trials.passed[self._tempering.index(sampled)]
        accepted, valid = _run_lengths(layout, best, passed)
        last = choice.gather(1, accepted[:, None])[:, 0]
        penalised = [g for g, f in enumerate(features) if f.penalised]
        emitted = np.zeros(0, np.int64)
        if trials is not None or penalised:
            ends, emitted = _to_host(layout, accepted, valid)
            if trials is not None:
                last = self._last(judged, sampled, ends, trials, last)
        result = _emit(layout, rows.draft_ids, accepted, valid, last)
        self._count([(g, i) for g in penalised for i in range(emitted[g])], rows, result.tokens)
        return result

    def choose(self, slots: Sequence[int], positions: Sequence[int]) -> DraftChoice:
        """How these slots pick their drafts.

        positions  position of each slot's first draft
        raises     BadRequest where a slot isn't bound
        """
        return DraftChoice(self.parameters, self._tempering, self._drawn, slots, positions)

    def _repeat(self, judged: Judged, favourite: Tensor) -> None:
        """Puts what plain decoding would draw in the place of the largest logit, for rows that repeat."""
        places = judged.repeating()
        if places.size:
            layout, rows = judged.layout, judged.rows
            groups, ahead = layout.groups[places].tolist(), layout.ahead[places].tolist()
            slots = {place: rows.slots[g] for place, g in zip(places.tolist(), groups, strict=True)}
            positions = [rows.positions[g] + i for g, i in zip(groups, ahead, strict=True)]
            drawn = self._drawn(judged.edited, places.tolist(), slots, positions)
            favourite[self._tempering.index(places)] = drawn

    def _drawn(
        self,
        logits: Tensor,
        places: Sequence[int],
        slots: Sequence[int] | dict[int, int],
        positions: list[int],
    ) -> Tensor:
        """What plain decoding draws from these rows of the logits, int64 [n]; `slots` by row."""
        wanted = Rows(tuple(slots[place] for place in places), tuple(positions))
        features = [self.parameters.of(slot) for slot in wanted.slots]
        return self._sampler.choose(logits, wanted, features, places).tokens

    def _last(self, judged: Judged, sampled: Int, ends: Int, trials: Trials, favourites: Tensor) -> Tensor:
        """The last token of every group: drawn for those that sample, else the favourite."""
        layout, rows, last = judged.layout, judged.rows, favourites.clone()
        complete = ends[sampled] == layout.widths[sampled] - 1
        cut_off, whole = sampled[~complete], sampled[complete]
        if cut_off.size:
            order, tokens = self._odds.replace(judged, cut_off, ends, trials)
            last[self._tempering.index(order)] = tokens
        if whole.size:
            bonus = Rows(
                tuple(rows.slots[g] for g in whole.tolist()),
                tuple(rows.positions[g] + int(ends[g]) for g in whole.tolist()),
            )
            features = [judged.features[g] for g in whole.tolist()]
            chosen = self._sampler.choose(
                judged.edited, bonus, features, (layout.firsts + ends)[whole].tolist()
            )
            last[self._tempering.index(whole)] = chosen.tokens
        return last

    def _count(self, cells: Sequence[tuple[int, int]], rows: VerifyRows, tokens: Tensor) -> None:
        """Count the emitted tokens at these (group, place)."""
        if cells:
            group, place = (self._tempering.index(column) for column in zip(*cells, strict=True))
            self.counts.add([rows.slots[g] for g, _ in cells], tokens[group, place])


def _run_lengths(layout: Layout, best: Tensor, passed: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts accepted of each group, int64 [B], and whether its rows are sound.

    best    float32 [B, gamma + 1], largest logit of each row
    passed  bool [B, gamma]
    """
    judges = torch.arange(layout.gamma, device=layout.device) < layout.device_widths[:, None] - 1
    # A row that allows nothing accepts nothing: its argmax is no choice.
    accepted = (passed & judges & (best[:, :-1] > float("-inf"))).cumprod(1).sum(1)
    reached = best.gather(1, accepted[:, None])[:, 0]
    return accepted, (best < float("inf")).all(1) & (reached > float("-inf"))


def _to_host(layout: Layout, accepted: Tensor, valid: Tensor) -> tuple[Int, Int]:
    """Drafts accepted and tokens emitted, int64 [B] each; the one wait for the device."""
    ends, sound = torch.stack((accepted, valid.to(torch.int64))).cpu().numpy()
    return ends, np.where((sound > 0) & (layout.widths > 0), ends + 1, 0)


def _emit(layout: Layout, draft_ids: Tensor, accepted: Tensor, valid: Tensor, last: Tensor) -> Accepted:
    """Each group's accepted drafts, and its last token behind them."""
    counts = torch.where(valid & (layout.device_widths > 0), accepted + 1, 0)
    places = torch.arange(layout.gamma + 1, device=layout.device)
    tokens = torch.where(places < accepted[:, None], F.pad(draft_ids, (0, 1)), last[:, None])
    return Accepted(torch.where(places < counts[:, None], tokens, 0), counts, valid)
