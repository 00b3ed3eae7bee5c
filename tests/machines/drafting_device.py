"""The device without a model, drafting: right and wrong tokens, rounds cut by a budget or a request's end."""

from __future__ import annotations

import random

import numpy as np

from engine.messages import RunStep, StepDone
from tests.machines.paged_device import FAILING, PagedDevice, Slot, sampled

RIGHT = 0.7
"""Chance of a draft to be the token that follows."""


class DraftingDevice(PagedDevice):
    """Runs steps in order; a step with `verify` drafts `block` tokens a decode row.

    ran  rows of each step
    """

    def __init__(self, block: int, seed: int) -> None:
        super().__init__()
        self.block = block
        self.random = random.Random(seed)
        self.ran: list[int] = []

    def _rows(self, step: RunStep) -> StepDone:
        if not step.verify:
            self.ran.append(len(step.tokens) // 4)
            return super()._rows(step)
        columns = (step.slots, step.generations, step.starts, step.counts)
        groups = list(zip(*[np.frombuffer(column, np.int32).tolist() for column in columns], strict=True))
        fed = np.frombuffer(step.tokens, np.int32).tolist()
        budget = step.budget if step.budget >= 0 else self.block * len(groups)
        runs, verified = [], []
        for (slot, generation, start, count), most, samples in zip(
            groups, step.verify, step.samples, strict=True
        ):
            state = self.slots[slot]
            assert state.bind.generation == generation
            given, fed = fed[:count], fed[count:]
            if most:
                assert count == 1
                assert state.length <= start
                assert given[0] in (-1, state.relay)
                rows = max(0, min(most, 1 + budget, state.bind.ends_at - state.length - 1))
                budget -= max(0, rows - 1)
                runs.append(self._round(state, rows))
                verified.append(rows)
            else:
                assert state.length == start
                runs.append([self._follow(state, given)] if samples else [self._follow(state, given)][1:])
                verified.append(0)
            if runs[-1]:
                state.relay = 0 if runs[-1][-1] == FAILING else runs[-1][-1]
        assert not fed
        self.ran.append(sum(row[3] for row in groups) + sum(max(0, rows - 1) for rows in verified))
        return self._done(step, runs, verified)

    def _done(self, step: RunStep, runs: list[list[int]], verified: list[int]) -> StepDone:
        failed = [place for place, run in enumerate(runs) if run == [FAILING]]
        tokens = [token for run in runs for token in run if token != FAILING]
        survival = np.array([[self.random.random()] * self.block for _ in runs], np.float32)
        slots = np.frombuffer(step.slots, np.int32).tolist()
        return StepDone(
            step.epoch,
            bytes(0 if run == [FAILING] else len(run) for run in runs),
            np.array(tokens, np.int32).tobytes(),
            tuple((place, "no token has a probability") for place in failed),
            verified=bytes(verified),
            survival=survival.tobytes() if step.budget else b"",
            lengths=np.array([self.slots[slot].length for slot in slots], np.int32).tobytes(),
        )

    def _follow(self, state: Slot, tokens: list[int]) -> int:
        for token in tokens:
            number = self._feed(state, state.relay if token == -1 else token)
        return sampled(number, state.bind.sampling.seed)

    def _round(self, state: Slot, rows: int) -> list[int]:
        """What the target says as long as the drafts say the same, and once more."""
        start, run, fed, right = state.length, [], state.relay, True
        for _ in range(rows):
            token = self._follow(state, [fed])
            if right and token == FAILING and not run:
                return [FAILING]
            right = right and token != FAILING
            if right:
                run.append(token)
            fed = token if token != FAILING and self.random.random() < RIGHT else 0
            right = right and fed == token
        state.length = start + len(run)
        return run
