"""Real steps before the first request: they pack weights, choose the threads, and find what is NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.config import Settings
from engine.errors import CheckpointError
from engine.messages import RunStep, Sampling, SlotBind, StepDone
from engine.runner.step import StepRunner
from engine.threads import choose_threads

WARM_TOKENS = 16
WARM_STEPS = 4


def warm_up(runner: StepRunner, settings: Settings, say: Callable[[str], None]) -> None:
    """Runs steps in slot 1, and leaves the slot to be bound anew.

    Every rank runs the same steps at once, so that their collectives meet.

    raises  CheckpointError where target or draft give NaN
    """
    steps = _WarmSteps(runner)
    if settings.device == "cpu":
        choose_threads(settings.threads, torch.set_num_threads, steps.plain, say, settings.dp_size)
    else:
        steps.plain()
    block = 0 if runner.speculation is None else runner.speculation.block
    if block:
        steps.draft(block)
    runner.choices.warm(1, block)


class _WarmSteps:
    """Steps of one request in slot 1, whose draws are seeded."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self._epoch = 0

    def plain(self) -> None:
        """A prompt, then a few tokens."""
        self._step(0, WARM_TOKENS, 0)
        for position in range(WARM_TOKENS, WARM_TOKENS + WARM_STEPS):
            self._step(position, 1, 0)

    def draft(self, block: int) -> None:
        """A prompt, then rounds of drafts, verified in full."""
        self._step(0, WARM_TOKENS, 0)
        for step in range(WARM_STEPS):
            bound = WARM_TOKENS + step * (block + 1)
            done = self._step(bound, 1, block + 1)
            survival = np.frombuffer(done.survival, np.float32)
            # A draft with NaN counts as one that can't survive, and a real one never comes down to 0.
            if survival.size != block or not (survival > 0).all():
                raise CheckpointError(f"the draft gives NaN: its tokens survive with {survival.tolist()}")

    def _step(self, start: int, count: int, verify: int) -> StepDone:
        self._epoch -= 1
        rows = verify or count
        ends_at = self.runner.state.config.max_position_embeddings
        done = self.runner.execute(
            RunStep(
                epoch=self._epoch,
                mode="decode" if start else "extend",
                slots=_column(1),
                generations=_column(0),
                starts=_column(start),
                counts=_column(count),
                tokens=_column(*range(count)),
                samples=b"\1",
                ranks=((1 if verify else -1, rows, rows if verify else 1),)
                * self.runner.model.groups.dp.size,
                pages=b"" if start else _column(1, 0, 1, 1),
                binds=() if start else (SlotBind(1, 0, 0, 0, _SAMPLING, WARM_TOKENS, b"", ends_at),),
                verify=bytes([verify]) if verify else b"",
                budget=-1 if verify else 0,
            )
        )
        if done.failed:
            raise CheckpointError(f"a step of the warm-up failed: {done.failed[0][1]}")
        return done


# Draws, so that a drafting step keeps its logits and looks at them.
_SAMPLING = Sampling(max_new_tokens=1, temperature=1.0)


def _column(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()
