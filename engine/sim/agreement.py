"""What all ranks of a run must do alike, from outside the machines."""

from __future__ import annotations

import numpy as np

from engine.actors.core import Core, Run
from engine.actors.rank import Rank
from engine.actors.schedule import Decision
from engine.messages import RunStep
from engine.sim.watch import Event, Watch


class SameSteps:
    """I2, I9, I12, I16: all ranks run the same rounds, by the same decision, from the same wants.

    whole  every draft is verified, whatever the budget
    """

    def __init__(self, watch: Watch, ranks: int, whole: bool) -> None:
        self._watch = watch
        self._ranks = ranks
        self._whole = whole
        self._closed: dict[int, int] = dict.fromkeys(range(ranks), 0)
        self._decided: dict[int, tuple[Decision, int]] = {}
        self.steps = 0

    def __call__(self, core: Core, event: Event) -> None:
        if not isinstance(core, Rank):
            return
        jobs = [effect.job for effect in event.effects if isinstance(effect, Run)]
        rank = core.setup.rank
        closed = core.next_epoch - self._closed[rank]
        self._closed[rank] = core.next_epoch
        if not closed:
            if jobs:
                self._watch.wrong("I2", f"rank {rank} runs step {jobs[0].epoch} without a decision")
            return
        assert core.decision is not None
        self.steps += len(jobs)
        if closed == 1:
            self._agree(rank, core.next_epoch - 1, core.decision, jobs)

    def _agree(self, rank: int, epoch: int, decision: Decision, jobs: list[RunStep]) -> None:
        first, count = self._decided.get(epoch, (decision, 0))
        if first.tokens != decision.tokens:
            self._watch.wrong(
                "I16", f"round {epoch}: rank {rank} read {decision.tokens}, a peer {first.tokens}"
            )
        if first != decision:
            self._watch.wrong("I2", f"round {epoch}: rank {rank} decided {decision}, a peer {first}")
        if len(jobs) != int(decision.runs):
            self._watch.wrong("I9", f"round {epoch}: rank {rank} runs {len(jobs)} steps; decided: {decision}")
        for job in jobs:
            self._count(rank, epoch, decision, job)
        if count + 1 == self._ranks:
            self._decided.pop(epoch, None)
        else:
            self._decided[epoch] = (first, count + 1)

    def _count(self, rank: int, epoch: int, decision: Decision, job: RunStep) -> None:
        tokens = rows_of(job, self._whole)
        if job.epoch != epoch or tokens != decision.tokens[rank]:
            self._watch.wrong(
                "I12", f"round {epoch}: rank {rank} runs {tokens} tokens in step {job.epoch}; {decision}"
            )
        if decision.bucket and decision.bucket < max(decision.tokens):
            self._watch.wrong(
                "I12", f"round {epoch}: {max(decision.tokens)} tokens in a graph of {decision.bucket}"
            )


def rows_of(job: RunStep, whole: bool) -> int:
    """Rows that the device runs for a step, at most."""
    rows = int(np.frombuffer(job.counts, np.int32).sum())
    drafts = sum(most - 1 for most in job.verify if most)
    if job.budget == 0:
        return rows
    return rows + (drafts if whole or job.budget < 0 else min(drafts, job.budget))
