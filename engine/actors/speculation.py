"""How much of the next step is drafted: the budget of each step, and probes while drafts don't pay.

The budget is a function of survival that is two steps old and of the cost table, never of the step's own
drafts: which rows are verified then tells nothing about their tokens (I13). Where drafts don't pay, nothing
is drafted, and nothing is learned either; so now and then a step drafts as a probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.actors.capacity import PROBE_BUDGET, BudgetPlan, CostTable, choose_budget, probe_period
from engine.actors.requests import Requests
from engine.actors.survival import LAG, NEVER, SurvivalHistory
from engine.messages import StepDone

if TYPE_CHECKING:
    from engine.actors.batches import Batch, Riders

STATIC, CAP_ACCEPT, COMPACT = "static", "cap-accept", "compact"
"""Verify modes: all drafts; all, but a scheduled prefix alone is accepted; a scheduled prefix alone."""

NONE, PLAIN, DRAFT, PROBE = "none", "plain", "draft", "probe"
KINDS = (NONE, PLAIN, DRAFT, PROBE)
"""What a step is to drafts: without decode rows, without drafts, with them, with one to learn from."""

FRESH = LAG + 2
"""So many steps a draft tells of its request's next ones; an older one tells less than the mean of all."""


MARGIN = 1.1
"""Drafts must promise a tenth more than plain decoding: cost tables are off by so much at their worst cells,
where a gain is as likely a loss.
"""

NO_LIMIT = -1
"""Budget of a step that verifies as many rows as each request may."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a rank speculates; equal on every rank.

    block  drafted tokens of a round
    mode   one of the verify modes
    table  what steps cost; None: every step verifies all it may, as in mode static
    """

    block: int
    mode: str
    table: CostTable | None = None


class Drafting(NamedTuple):
    """What was decided of one step's drafts.

    kind     one of KINDS
    budget   as in RunStep
    drafts   drafted rows that the step verifies, at most
    trimmed  drafted rows that requests had no room for: a page was missing, or they end before
    plan     what is expected of the step; None: nothing
    """

    kind: str
    budget: int
    drafts: int
    trimmed: int = 0
    plan: BudgetPlan | None = None


class Drafts:
    """Decides on each step's drafts.

    history  by slot; None: budgets don't depend on it
    drafted  int64 by slot: the last step that drafted for it
    plain    steps with decode rows since one drafted last
    """

    def __init__(self, setup: Speculation, requests: Requests) -> None:
        self.setup = setup
        self.requests = requests
        self.history: SurvivalHistory | None = None
        if setup.mode != STATIC and setup.table is not None:
            self.history = SurvivalHistory(requests.held.generations.size, setup.block)
        self.drafted = np.full(requests.held.generations.size, NEVER)
        self.plain = 0

    def schedule(self, epoch: int, riders: Riders) -> None:
        """Sets the step's budget, and lowers the riders' caps to what it may use."""
        rows = riders.caps.size
        if not rows:
            riders.drafting = Drafting(NONE, 0, 0)
            return
        room = int(riders.caps.sum()) - rows
        kind, budget, plan = self._choose(epoch, riders, room)
        if budget == 0 or (budget > 0 and self.setup.mode == COMPACT):
            riders.caps = np.minimum(riders.caps, 1 + budget)
        if kind in (DRAFT, PROBE):
            self.drafted[self.requests.held.slot[riders.decodes]] = epoch
        drafts = int(riders.caps.sum()) - rows
        if budget > 0 and self.setup.mode == COMPACT:
            drafts = min(drafts, budget)
        riders.drafting = Drafting(kind, budget, drafts, rows * self.setup.block - room, plan)

    def _choose(self, epoch: int, riders: Riders, room: int) -> tuple[str, int, BudgetPlan | None]:
        table = self.setup.table
        if not room:
            return PLAIN, 0, None
        if self.history is None or table is None:
            return DRAFT, NO_LIMIT, None
        held, rows = self.requests.held, riders.caps.size
        slots = held.slot[riders.decodes]
        survival = self.history.at(epoch, slots, held.generations[slots])
        # One draft that looked poor must not keep its request from drafting until the next probe.
        survival[self.drafted[slots] < epoch - FRESH] = self.history.prior(epoch)
        prompt_tokens = sum(end - start for _, start, end in riders.chunks)
        plan = choose_budget(survival, riders.caps, table, prompt_tokens, MARGIN)
        if plan.budget:
            self.plain = 0
            return DRAFT, plan.budget, plan
        self.plain += 1
        if self.plain < probe_period(table, rows):
            return PLAIN, 0, plan
        self.plain = 0
        probe_s = float(table.seconds(rows, rows + prompt_tokens + PROBE_BUDGET, True))
        return PROBE, PROBE_BUDGET, plan._replace(expected_s=probe_s)

    def note(self, batch: Batch, done: StepDone) -> None:
        """The step's drafts, as the device judged them before it verified any."""
        if self.history is None or not done.survival:
            return
        survival = np.frombuffer(done.survival, np.float32).reshape(-1, self.setup.block)
        verified = np.frombuffer(done.verified, np.uint8)
        at = np.flatnonzero(verified[: batch.decodes])
        slots = np.frombuffer(batch.step.slots, np.int32)[at]
        generations = np.frombuffer(batch.step.generations, np.int32)[at]
        self.history.note(done.epoch, slots, generations, survival[at])

    def snapshot(self) -> tuple[Any, ...]:
        """What changes, for the search."""
        if self.history is None:
            return ()
        return self.plain, self.drafted.tobytes(), self.history.snapshot()

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        if self.history is not None:
            self.plain = taken[0]
            self.drafted[:] = np.frombuffer(taken[1], np.int64)
            self.history.restore(taken[2])
