"""`python -m engine replay`: the whole engine in virtual time, with faults, from two seeds."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.errors import ConfigError
from engine.fsm.owners import ROOT
from engine.sim.draw import first_request, sequence
from engine.sim.faults import POINTS
from engine.sim.many import Seeds, Totals, accumulate, run_many, spread
from engine.sim.run import Outcome, replay
from engine.sim.scenario import Scenario, load_scenario, plan_of, scenario_files
from engine.sim.scenario_text import as_toml
from engine.sim.shrink import shrink

DESCRIPTION = """\
Runs a scenario of specs/scenarios (or a file that ends in .toml) with the cores, shells, mailboxes, timers
and links that ship, a simulated device and simulated clocks. --data decides what clients want and which
faults happen, --order who runs first and how long everything takes. Equal seeds give an equal trace hash, in
any process.

A violation prints the newest events, the command that reproduces it, and the scenario made smaller (see
--keep). Exit status: 0 all well, 1 an invariant was violated, 2 the scenario can't be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `replay`."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "scenario", nargs="?", default="all", help="name or file; `all` (default): each in turn"
    )
    parser.add_argument("--data", type=int, default=None, metavar="N", help="seed of workload and faults")
    parser.add_argument(
        "--order", type=int, default=None, metavar="M", help="seed of the schedule and durations"
    )
    parser.add_argument("--seeds", type=int, metavar="K", help="so many runs, both seeds counting up")
    parser.add_argument("--count", type=Path, metavar="FILE", help="add clean seeds to this file's count")
    parser.add_argument("--draw", action="store_true", help="print one request as a Mermaid sequence diagram")
    parser.add_argument(
        "--request", type=int, default=0, metavar="ID", help="the one to draw; else the first"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write a failure's shrunk scenario here")
    parser.add_argument("--list-faults", action="store_true", help="list the fault points and who uses them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    """Does it; 0, 1 or 2 as the description says."""
    try:
        if args.list_faults:
            return list_faults()
        if args.seeds is None and args.scenario != "all":
            return _one(args, load_scenario(args.scenario))
        return _many(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _one(args: argparse.Namespace, scenario: Scenario) -> int:
    data = scenario.data if args.data is None else args.data
    order = scenario.order if args.order is None else args.order
    plan = plan_of(scenario, data)
    outcome = replay(plan, order, keep_all=args.draw)
    if args.draw:
        print(sequence(outcome.kept, args.request or first_request(outcome.kept)))
    fates = ", ".join(f"{count} {fate}" for fate, count in sorted(outcome.fates.items()))
    hits = ", ".join(f"{name} x{count}" for name, count in sorted(outcome.hits.items())) or "none"
    print(f"clients: {fates}; faults: {hits}")
    print(f"{outcome.steps} rank-steps, {outcome.events} messages, {outcome.virtual_s:.3f} virtual seconds")
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(outcome), indent=1) + "\n")
    if outcome.violation is not None:
        explain(Seeds(args.scenario, data, order), outcome, args.keep)
    print(f"trace {outcome.digest}")
    return 0 if outcome.violation is None else 1


def _many(args: argparse.Namespace) -> int:
    names = [path.stem for path in scenario_files()] if args.scenario == "all" else [args.scenario]
    seeds = spread(names, args.data or 0, args.order or 0, args.seeds or len(names))
    totals = run_many(seeds, say=lambda line: print(line, flush=True))
    print(totals.line())
    print(f"fault points not reached: {', '.join(totals.missed()) or 'none'}")
    if args.json is not None:
        args.json.write_text(json.dumps(totals_as_json(totals), indent=1) + "\n")
    if totals.broken is not None:
        explain(*totals.broken, args.keep)
        return 1
    if args.count is not None:
        accumulate(args.count, totals, commit())
    return 0


def explain(seeds: Seeds, outcome: Outcome, keep: Path | None, say: Callable[[str], None] = print) -> None:
    """All that a person needs of a violation: what, how it came, how to see it again, and smaller."""
    assert outcome.violation is not None
    for event in outcome.kept:
        say(event.line())
    for report in outcome.reports[-5:]:
        say(report)
    say(f"VIOLATION {outcome.violation.report()}")
    say(f"reproduce: {seeds.command()}")
    small = shrink(plan_of(load_scenario(seeds.scenario), seeds.data), seeds.order, outcome.violation.id)
    text = as_toml(small.kept_as(seeds.data, seeds.order, outcome.violation.report()))
    if keep is None:
        say(f"shrunk scenario:\n{text}")
    else:
        keep.write_text(text)
        say(f"shrunk scenario in {keep}; it belongs in tests/seeds")


def list_faults() -> int:
    """Prints each declared fault point with its seam and the scenarios that name it; 0."""
    users: dict[str, list[str]] = {name: [] for name in POINTS}
    for path in scenario_files():
        for kind in sorted({fault.kind for fault in load_scenario(path.stem).fault}):
            users[kind].append(path.stem)
    for name, one in POINTS.items():
        by = ", ".join(users[name]) or ("clients and bounds" if one.act is None else "nobody")
        print(f"{name:<15} {one.seam:<34} {one.say}\n{'':<15} used by: {by}")
    return 0


def totals_as_json(totals: Totals) -> dict[str, object]:
    """For machines."""
    return {
        "ok": totals.broken is None,
        "seeds": totals.seeds,
        "rank_steps": totals.steps,
        "messages": totals.events,
        "virtual_seconds": round(totals.virtual_s, 3),
        "seconds": round(totals.seconds, 3),
        "rank_steps_per_second": round(totals.steps / totals.seconds) if totals.seconds else 0,
        "by_scenario": dict(sorted(totals.by_scenario.items())),
        "clients": dict(sorted(totals.fates.items())),
        "faults": dict(sorted(totals.hits.items())),
        "faults_not_reached": totals.missed(),
        "violation": None if totals.broken is None else _as_json(totals.broken[1]),
        "reproduce": None if totals.broken is None else totals.broken[0].command(),
    }


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "ok": outcome.violation is None,
        "trace": outcome.digest,
        "rank_steps": outcome.steps,
        "virtual_seconds": round(outcome.virtual_s, 6),
        "clients": outcome.fates,
        "faults": outcome.hits,
        "violation": None if outcome.violation is None else outcome.violation.report(),
    }


def commit() -> str:
    """The checkout's commit; `unknown` outside one."""
    made = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return made.stdout.strip() or "unknown"
