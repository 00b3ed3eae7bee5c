"""Ranks that draft, for searches: their devices end a step with no, all or some drafts accepted."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from engine.actors.capacity import CostTable, Curve
from engine.actors.core import Send
from engine.actors.rank import Rank
from engine.actors.speculation import Speculation
from engine.fsm.owners import module_at
from engine.messages import RunStep, StepDone, StepOut

RANKS = module_at("specs/search/ranks.py", "specs/search/drafts.py")
BLOCK = 2


def rank(mode: str = "static", draft_s: float = -1.0, **changes: int) -> Rank:
    """As in ranks.py, drafting two tokens a round; with `draft_s`, budgets from costs and probes."""
    table = None
    if draft_s >= 0:
        table = CostTable(0.01, Curve([1], [0.0]), Curve([1, 9], [0.0, 0.001]), Curve([1], [draft_s]))
    return RANKS.rank(speculation=Speculation(BLOCK, mode, table), **changes)


class Devices(RANKS.Devices):  # type: ignore[misc]
    """Devices whose rounds end with one token a row, all drafts accepted, an end amid them, or a failure.

    outcomes  token, all, eos, fail
    survival  of every draft
    lengths   committed length of each slot of each device
    """

    DATA: ClassVar[tuple[str, ...]] = (*RANKS.Devices.DATA, "lengths", "limits")

    def __init__(self, survival: float = 1.0, **values: Any) -> None:
        super().__init__(**values)
        self.survival = survival
        self.lengths: dict[str, dict[int, int]] = {name: {} for name in self.queues}
        self.limits: dict[str, dict[int, int]] = {name: {} for name in self.queues}

    def observe(self, sender: str, effect: Any) -> list[Any]:
        """As in ranks.py; and no token leaves behind one that ends its request (I6)."""
        found: list[Any] = super().observe(sender, effect)
        if isinstance(effect, Send) and isinstance(effect.msg, StepOut):
            tokens = np.frombuffer(effect.msg.token_ids, np.int32)
            ends = np.cumsum(np.frombuffer(effect.msg.counts, np.uint8))
            after = np.delete(tokens, ends[ends > 0] - 1)
            if RANKS.EOS in after:
                self.faulty = "I6"
        return found

    def choose(self, choice: tuple[str, str]) -> list[Any]:
        """The step's results go to its rank."""
        name, outcome = choice
        if outcome == "die":
            return super().choose(choice)
        step = self.queues[name].pop(0)
        if not step.verify:
            return [Send(name, RANKS.done(step, outcome))]
        return [Send(name, self._done(name, step, outcome))]

    def _done(self, name: str, step: RunStep, outcome: str) -> StepDone:
        lengths, limits = self.lengths[name], self.limits[name]
        for bind in step.binds:
            lengths[bind.slot], limits[bind.slot] = 0, bind.ends_at
        counts, verified, failed = [], [], []
        budget = step.budget if step.budget >= 0 else len(step.verify) * BLOCK
        slots, fed = (np.frombuffer(column, np.int32).tolist() for column in (step.slots, step.counts))
        for place, (slot, count, most, samples) in enumerate(
            zip(slots, fed, step.verify, step.samples, strict=True)
        ):
            rows = max(0, min(most, limits[slot] - lengths[slot] - 1))
            if most:
                rows = min(rows, 1 + budget)
                budget -= max(0, rows - 1)
            gained = min(rows, 1 if outcome == "token" else rows) if most else samples
            if outcome == "fail" and gained:
                failed.append((place, "no token has a probability"))
                gained = 0
            lengths[slot] += gained if most else count
            counts.append(gained)
            verified.append(rows)
        return StepDone(
            step.epoch,
            bytes(counts),
            np.array([token for count in counts for token in _run(count, outcome)], np.int32).tobytes(),
            tuple(failed),
            verified=bytes(verified),
            survival=np.full((len(counts), BLOCK), self.survival, np.float32).tobytes()
            if step.budget
            else b"",
            lengths=np.array([lengths[slot] for slot in slots], np.int32).tobytes(),
        )


def _run(count: int, outcome: str) -> list[int]:
    """Tokens of a round; an end has a token behind it wherever there is room for one."""
    tokens = [RANKS.WORD] * count
    if outcome == "eos" and count:
        tokens[max(0, count - 2)] = RANKS.EOS
    return tokens
