"""What the masks of steps cost and find, for metrics; no decision reads it."""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np

from engine.grammar.matchers import DEAD, ENDED, FREE, MASKED, Traversed

PHASES = ("draft_d2h", "draft_wait", "barrier", "traverse", "mask_h2d", "wait")

KINDS = {FREE: "free", MASKED: "masked", ENDED: "ended", DEAD: "dead"}

PATHS = ("device", "thread")
"""Who makes the masks of a step: the device thread, where few requests have a grammar; the grammar thread."""

PATH = "scalar batch"
"""How chains are traversed: one call of the library after the other."""


class Phase:
    """A block that is measured, unless it raises. Not a generator: a step enters two dozen of them."""

    __slots__ = ("_began_s", "_counters", "_name")

    def __init__(self, counters: PipelineCounters, name: str) -> None:
        self._counters, self._name = counters, name

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._counters.seconds[self._name] += time.perf_counter() - self._began_s
            self._counters.times[self._name] += 1


class PipelineCounters:
    """Totals since the start. The device thread writes waits, paths and complete ends; the lane the rest.

    batches       steps with masks, by whether all of their requests got some
    paths         steps with masks, by who made them
    rows          by what a row's mask means
    terminations  by how a constrained request's grammar came to its end
    seconds       sum and number by phase
    """

    def __init__(self) -> None:
        self.batches = {"complete": 0, "partial": 0}
        self.paths = dict.fromkeys(PATHS, 0)
        self.rows = dict.fromkeys(KINDS.values(), 0)
        self.terminations = {"complete": 0, "failed": 0}
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.times = dict.fromkeys(PHASES, 0)

    def phase(self, name: str) -> Phase:
        """Measures what is done in the block."""
        return Phase(self, name)

    def made(self, walked: Traversed, failed: Collection[int]) -> None:
        """A step's masks are there."""
        self.batches["partial" if failed else "complete"] += 1
        self.terminations["failed"] += len(failed)
        for kind, count in enumerate(np.bincount(walked.kinds, minlength=len(KINDS)).tolist()):
            self.rows[KINDS[kind]] += count

    def ended(self, grammars: int) -> None:
        """So many grammars ended with a step's tokens."""
        self.terminations["complete"] += grammars

    def figures(self) -> dict[str, float]:
        """By metric name, with the label in braces."""
        figures: dict[str, float] = {}
        for name, label, values in (
            ("dspark_grammar_batches_total", "outcome", self.batches),
            ("dspark_grammar_paths_total", "path", self.paths),
            ("dspark_grammar_rows_total", "outcome", self.rows),
            ("dspark_grammar_terminations_total", "outcome", self.terminations),
            ("dspark_grammar_seconds_sum", "phase", self.seconds),
            ("dspark_grammar_seconds_count", "phase", self.times),
        ):
            figures.update((f'{name}{{{label}="{value}"}}', amount) for value, amount in values.items())
        return figures
