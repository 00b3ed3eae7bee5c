"""A rank that drafts, and rounds whose results are given by hand."""

from __future__ import annotations

import numpy as np

from engine.actors.capacity import CostTable, Curve
from engine.actors.speculation import STATIC, Speculation
from engine.messages import RunStep, StepDone
from tests.machines.harness import Harness

DEAR = CostTable(0.01, Curve([1], [0.0]), Curve([1, 9], [0.0, 0.001]), Curve([1], [0.02]))
CHEAP = CostTable(0.01, Curve([1], [0.0]), Curve([1, 9], [0.0, 0.001]), Curve([1], [0.0001]))


def drafting(mode: str = STATIC, table: CostTable | None = None, **changes: object) -> Harness:
    """A rank that drafts three tokens."""
    return Harness(speculation=Speculation(3, mode, table), **changes)


def answer(
    h: Harness, runs: list[list[int]], lengths: list[int], survival: float = 0.5, **columns: object
) -> None:
    """The oldest step ends with these tokens."""
    step: RunStep = h.jobs[0].popleft()
    tokens = np.array([token for run in runs for token in run], np.int32)
    rows = len(step.verify)
    h.tell(
        StepDone(
            step.epoch,
            bytes(map(len, runs)),
            tokens.tobytes(),
            verified=step.verify,
            survival=np.full((rows, 3), survival, np.float32).tobytes() if step.budget else b"",
            lengths=np.array(lengths, np.int32).tobytes(),
            **columns,
        )
    )


def begun(h: Harness, *items: object) -> None:
    """These requests have their prompts of 4 tokens computed and one token, 7."""
    h.submit(*items)
    answer(h, [[7]] * len(items), [4] * len(items))
