"""`python -m engine check`: searches of every machine, and replays of the whole engine while time is left."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator

from engine.fsm import check
from engine.fsm.check import Report, add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Does it; 0 where all is well, 1 otherwise."""
    return check.run(args, then=None if args.minutes is None else replays)


def replays(report: Report) -> None:
    """Replays all scenarios in turn, from fresh seeds, until the report's time is up."""
    # Imported here: without --minutes nothing of the engine itself is needed.
    from engine.commands.replay import explain, totals_as_json
    from engine.sim.many import Seeds, run_many
    from engine.sim.scenario import scenario_files

    draw = random.SystemRandom()
    names = [path.stem for path in scenario_files()]

    def fresh() -> Iterator[Seeds]:
        for name in itertools.cycle(names):
            yield Seeds(name, draw.getrandbits(32), draw.getrandbits(32))

    totals = run_many(fresh(), report.until, say=lambda line: print(f"replay  {line}", flush=True))
    print(f"replay  {totals.line()}")
    report.replays = totals_as_json(totals)
    if totals.broken is not None:
        lines: list[str] = []
        explain(*totals.broken, keep=None, say=lines.append)
        report.fail("\n".join(lines))
