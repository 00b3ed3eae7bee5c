"""What drafts bring, for the metrics and a log line; no decision reads it.

Acceptance is counted of what was verified, also in rows whose request had ended: it is a figure of the draft.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.actors.batches import Batch
from engine.actors.schedule import Column
from engine.actors.speculation import DRAFT, KINDS, NONE, PLAIN, PROBE
from engine.messages import StepDone

Pairs = NDArray[np.float64]

LOG = logging.getLogger("engine.speculation")

PHASES = ("draft", "verify", "commit")

EAGER = "eager"
"""Tier of steps for which the ranks agreed on no captured size."""

KEPT = 0.95
"""Weight of what the running means were before a step."""

SAY_EVERY_S = 30.0
"""From one log line to the next."""

SILENT_STEPS = 500
"""So many decode steps in a row without a single draft are told of as a fault."""


class SpecLedger:
    """Totals since the start, running means, and sums since the last log line.

    block   drafted tokens of a round
    tiers   steps that verified drafts, by the captured size in tokens that the ranks agreed on
    means   by name: tokens and rows of a request's round, share of verified drafts that were accepted
    silent  decode steps since one drafted last
    """

    def __init__(self, block: int, captured: Sequence[int] = ()) -> None:
        self.block = block
        self.totals = dict.fromkeys(
            (
                "verify_calls",
                "drafts",
                "draft_tokens",
                "verified_tokens",
                "accepted_tokens",
                "emitted_tokens",
            ),
            0,
        )
        self.trimmed = 0
        self.steps = dict.fromkeys(KINDS, 0)
        self.tiers = dict.fromkeys((EAGER, *map(str, captured)), 0)
        self.phases = np.zeros(len(PHASES))
        self.accepted_at = np.zeros(block, np.int64)
        self.lengths = np.zeros(block + 2, np.int64)
        self.means = dict.fromkeys(("accept_length", "cap_length", "accept_rate"), 0.0)
        self.budget = 0
        self.silent = 0
        # Of steps whose costs were estimated: tokens and seconds, expected, plain and real.
        self._sums = np.zeros((3, 2))
        self._unsaid = np.zeros((3, 2))
        self._rates = np.zeros(3)
        self._said_s: float | None = None

    def note(self, batch: Batch, done: StepDone) -> None:
        """A step's results are on the host."""
        drafting = batch.drafting
        assert drafting is not None
        counts = np.frombuffer(done.counts, np.uint8)[: batch.decodes].astype(np.int64)
        rows = np.frombuffer(done.verified, np.uint8)[: batch.decodes].astype(np.int64)
        self.steps[drafting.kind] += 1
        if drafting.kind in (DRAFT, PROBE):
            self.tiers[str(batch.step.bucket) if batch.step.bucket else EAGER] += 1
        self.phases += done.phases
        self.budget = drafting.budget
        self.trimmed += drafting.trimmed if drafting.kind != NONE else 0
        self.totals["emitted_tokens"] += int(counts.sum())
        if drafting.plan is not None:
            plan = drafting.plan
            self._sums[0] += (plan.expected_tokens, plan.expected_s)
            self._sums[1] += (batch.decodes, plan.plain_s)
            self._sums[2] += (counts.sum(), done.seconds)
        if drafting.kind in (DRAFT, PROBE) and rows.any():
            self._note_drafts(counts[rows > 0], rows[rows > 0])
        elif drafting.kind == PLAIN:
            self.silent += 1

    def _note_drafts(self, counts: Column, rows: Column) -> None:
        self.silent = 0
        accepted, verified = np.maximum(counts - 1, 0), rows - 1
        totals = self.totals
        totals["verify_calls"] += counts.size
        totals["drafts"] += counts.size
        totals["draft_tokens"] += counts.size * self.block
        totals["verified_tokens"] += int(verified.sum())
        totals["accepted_tokens"] += int(accepted.sum())
        self.accepted_at += (accepted[:, None] > np.arange(self.block)).sum(axis=0)
        self.lengths += np.bincount(rows, minlength=self.lengths.size)[: self.lengths.size]
        fresh = {"accept_length": float(counts.mean()), "cap_length": float(rows.mean())}
        if verified.any():
            fresh["accept_rate"] = float(accepted.sum() / verified.sum())
        first = totals["drafts"] == counts.size
        for name, value in fresh.items():
            self.means[name] = value if first else KEPT * self.means[name] + (1 - KEPT) * value

    def note_tick(self, now_s: float) -> None:
        """Rates since the last tick, and a log line when it is time."""
        if self._sums.any():
            self._rates = _rates(self._sums)
        self._unsaid += self._sums
        self._sums[:] = 0
        if self._said_s is None:
            self._said_s = now_s
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        if self.silent >= SILENT_STEPS:
            LOG.warning("drafting is on, but the last %d decode steps drafted nothing", self.silent)
        elif self.totals["drafts"]:
            LOG.info("%s", self.line())
        self._unsaid[:] = 0

    def line(self) -> str:
        """For a person: what was expected of drafts, and what they brought."""
        expected, plain, real = _rates(self._unsaid)
        return (
            f"drafts: {self.means['accept_length']:.2f} tokens a round of {self.means['cap_length']:.2f} "
            f"rows, {self.means['accept_rate']:.0%} of the verified accepted; tokens/s expected "
            f"{expected:.0f}, without drafts {plain:.0f}, measured {real:.0f}; steps "
            + ", ".join(f"{kind} {count}" for kind, count in self.steps.items())
        )

    def figures(self, cut: dict[str, int]) -> dict[str, float]:
        """All figures by name, as in Ledger.

        cut  rounds whose last tokens, or verified rows, came after their request's end, by cause
        """
        figures: dict[str, float] = {f"spec_{name}": mean for name, mean in self.means.items()}
        figures |= {f"spec_{name}_total": total for name, total in self.totals.items()}
        figures |= {
            "spec_num_draft_tokens": self.block,
            "spec_budget": self.budget,
            "spec_steps_without_draft": self.silent,
            "spec_cap_trimmed_total": self.trimmed,
            "spec_expected_tokens_per_second": float(self._rates[0]),
            "spec_plain_tokens_per_second": float(self._rates[1]),
            "spec_gained_tokens_per_second": float(self._rates[2]),
        }
        labelled = (
            ("spec_steps_total", "kind", self.steps),
            ("spec_verify_tier_total", "tier", self.tiers),
            ("spec_rows_truncated_total", "reason", cut),
            ("spec_phase_seconds_total", "phase", dict(zip(PHASES, self.phases.tolist(), strict=True))),
            ("spec_accepted_tokens_per_pos_total", "position", dict(enumerate(self.accepted_at.tolist(), 1))),
            ("spec_verify_length_total", "rows", dict(enumerate(self.lengths.tolist()[1:], 1))),
        )
        for name, label, values in labelled:
            figures.update((f'{name}{{{label}="{value}"}}', amount) for value, amount in values.items())
        return figures


def _rates(sums: Pairs) -> Pairs:
    """Tokens a second, of rows (tokens, seconds); 0 where there are no seconds."""
    seconds = sums[:, 1]
    return np.divide(sums[:, 0], seconds, out=np.zeros(len(sums)), where=seconds > 0)
