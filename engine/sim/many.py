"""Many seeds in one process: runs them one after the other, adds up, and stops at the first violation."""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.sim.faults import POINTS
from engine.sim.run import Outcome, replay
from engine.sim.scenario import Scenario, load_scenario, plan_of

COLLECT_EVERY, REPORT_EVERY = 20, 500
"""Runs between two collections of garbage, and between two lines of progress."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """One run: a scenario by name, and its two seeds."""

    scenario: str
    data: int
    order: int

    def command(self) -> str:
        """What reproduces it."""
        return f"python -m engine replay {self.scenario} --data {self.data} --order {self.order}"


@dataclass(slots=True)
class Totals:
    """Sums over runs. `seconds` of this machine; `hits`: fault points reached; `broken`: the first
    violation.
    """

    seeds: int = 0
    steps: int = 0
    events: int = 0
    virtual_s: float = 0.0
    seconds: float = 0.0
    by_scenario: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    broken: tuple[Seeds, Outcome] | None = None

    def add(self, seeds: Seeds, outcome: Outcome) -> None:
        """One more run."""
        self.seeds += 1
        self.steps += outcome.steps
        self.events += outcome.events
        self.virtual_s += outcome.virtual_s
        self.seconds += outcome.real_s
        self.by_scenario[seeds.scenario] += 1
        self.fates.update(outcome.fates)
        self.hits.update(outcome.hits)

    def line(self) -> str:
        """For a person."""
        rate = self.steps / self.seconds if self.seconds else 0.0
        return (
            f"{self.seeds} seeds, {self.steps} rank-steps, {self.events} messages, {self.virtual_s:.0f} "
            f"virtual seconds in {self.seconds:.1f} s: {rate:.0f} rank-steps a second"
        )

    def missed(self) -> list[str]:
        """Declared fault points that no run reached."""
        return [name for name in POINTS if not self.hits[name]]


def spread(names: Sequence[str], data: int, order: int, count: int) -> Iterator[Seeds]:
    """So many runs, the scenarios in turn, both seeds counting up from where they begin."""
    for number in range(count):
        yield Seeds(names[number % len(names)], data + number // len(names), order + number // len(names))


def run_many(
    runs: Iterable[Seeds], until_s: float = float("inf"), say: Callable[[str], None] = print
) -> Totals:
    """Runs until the first violation, the last seed, or that time of the process's clock."""
    totals = Totals()
    loaded: dict[str, Scenario] = {}
    with collecting_seldom() as collect:
        for seeds in runs:
            if time.monotonic() > until_s:
                break
            if seeds.scenario not in loaded:
                loaded[seeds.scenario] = load_scenario(seeds.scenario)
            outcome = replay(plan_of(loaded[seeds.scenario], seeds.data), seeds.order)
            totals.add(seeds, outcome)
            if outcome.violation is not None:
                totals.broken = (seeds, outcome)
                break
            if totals.seeds % COLLECT_EVERY == 0:
                collect()
            if totals.seeds % REPORT_EVERY == 0:
                say(totals.line())
    return totals


@contextmanager
def collecting_seldom() -> Iterator[Callable[[], object]]:
    """Within the block garbage is collected when the caller says so; otherwise it takes a sixth of the time.

    What was there before isn't walked at all.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()


def accumulate(path: Path, totals: Totals, commit: str) -> None:
    """Adds clean seeds to the file that counts them; one entry a commit, and the sum of all."""
    empty: dict[str, Any] = {"seeds": 0, "runs": []}
    body: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else empty
    body["seeds"] += totals.seeds
    runs = {run["commit"]: run for run in body["runs"]}
    fresh: dict[str, Any] = {"commit": commit, "seeds": 0, "rank_steps": 0, "seconds": 0.0, "by_scenario": {}}
    run = runs.setdefault(commit, fresh)
    run["seeds"] += totals.seeds
    run["rank_steps"] += totals.steps
    run["seconds"] = round(run["seconds"] + totals.seconds, 1)
    for name, count in sorted(totals.by_scenario.items()):
        run["by_scenario"][name] = run["by_scenario"].get(name, 0) + count
    body["runs"] = list(runs.values())
    path.write_text(json.dumps(body, indent=1) + "\n")
