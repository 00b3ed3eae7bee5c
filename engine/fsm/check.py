"""`python -m engine check`: loads and searches every spec."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.fsm.explore import Explorer, Found
from engine.fsm.load import spec_named
from engine.fsm.mutate import drop_rows
from engine.fsm.owners import SPECS, module_at, shown
from engine.fsm.search import Search, load_search
from engine.fsm.spec import Spec
from engine.fsm.system import System, load_system

DESCRIPTION = """\
Loads every machine of specs/ (all names resolved, every pair of state and event answered, all states
reachable), checks specs/system.toml, and runs the searches of specs/search/: breadth first over the cores
that ship, with their channels, up to the first state that breaks an invariant, an event that nobody
expected, a run that ends where it may not, or a part from which no end can be reached. The shortest such
run is printed. Each search also has to find exactly as many states as its file says.

--deep also runs the searches marked deep, and drops each row of each machine in turn, in each of its
states: a row whose loss no search notices fails the check. --minutes M gives all this at most M minutes, and
fills what is left with replays of the whole engine from fresh seeds. Exit status: 0 all well, 1 something is
wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `check`."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--deep", action="store_true", help="also the deep searches, and dropping each row")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="take M minutes, replays included; fail if late"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcome as JSON")


@dataclass
class Report:
    """What `check` found; printed as it goes, kept for JSON."""

    until: float
    failures: list[str] = field(default_factory=list)
    searches: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    replays: dict[str, Any] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        """Records and prints one failure."""
        self.failures.append(text)
        print(f"FAIL  {text}", flush=True)

    def late(self) -> bool:
        """True when the time allowed has passed."""
        return time.monotonic() > self.until


def run(args: argparse.Namespace, then: Callable[[Report], None] | None = None) -> int:
    """Does it; 0 where all is well, 1 otherwise.

    then  called when all else is done and well: replays until the report's time is up
    """
    began = time.monotonic()
    report = Report(began + 60 * args.minutes if args.minutes is not None else float("inf"))
    specs = load_all(report)
    if not report.failures:
        system = _system(specs, report)
        results = _searches(specs, args.deep, report)
        if system is not None and not report.failures:
            compare_sends(system, [found for _, found in results], report)
        if args.deep and not report.failures:
            _rows(specs, results, report)
        if then is not None and not report.failures:
            then(report)
    seconds = time.monotonic() - began
    states = sum(one["states"] for one in report.searches)
    _summary(specs, report)
    verdict = f"{len(report.failures)} failures" if report.failures else "all well"
    print(
        f"{len(specs)} machines, {len(report.searches)} searches, {states} states, {seconds:.1f} s: {verdict}"
    )
    if args.json is not None:
        outcome = {
            "ok": not report.failures,
            "deep": args.deep,
            "seconds": round(seconds, 3),
            "machines": {spec.name: spec.digest for spec in specs},
            "states": states,
            "searches": report.searches,
            "edges": sum(one["edges"] for one in report.searches),
            "rows": report.rows,
            "rows_needed": sum(row["noticed_by"] is not None for row in report.rows),
            "replays": report.replays,
            "failures": report.failures,
        }
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 1 if report.failures else 0


def _summary(specs: list[Spec], report: Report) -> None:
    """A line a machine: its size, and how many of its dropped rows were noticed; then the sums."""
    print(f"{'machine':<12}{'states':>8}{'events':>8}{'rows':>6}{'dropped rows noticed':>22}")
    for spec in specs:
        rows = [row for row in report.rows if row["row"].startswith(f"{shown(spec.path)}:")]
        noticed = f"{sum(row['noticed_by'] is not None for row in rows)} of {len(rows)}" if rows else "-"
        print(f"{spec.name:<12}{len(spec.states):>8}{len(spec.events):>8}{len(spec.rows):>6}{noticed:>22}")
    states, edges = (sum(one[key] for one in report.searches) for key in ("states", "edges"))
    print(f"searches: {states} states, {edges} edges; seeds replayed: {report.replays.get('seeds', 0)}")


def machine_files(folder: Path = SPECS) -> list[Path]:
    """The files of all machines."""
    return sorted(path for path in folder.glob("*.toml") if path.name != "system.toml")


def load_all(report: Report) -> list[Spec]:
    """All machines that load; a failure for each other."""
    specs = []
    for path in machine_files():
        try:
            specs.append(spec_named(path.stem))
        except (EngineError, ImportError) as error:
            report.fail(str(error))
    for spec in specs:
        pairs = len(spec.states) * len(spec.events)
        rows = f"{len(spec.rows)} rows, {pairs} pairs"
        print(f"spec    {spec.name:<24} {len(spec.states)} states, {len(spec.events)} events, {rows}")
    return specs


def _system(specs: list[Spec], report: Report) -> System | None:
    try:
        messages = module_at("engine/messages", "system.toml")
        system = load_system(SPECS / "system.toml", {spec.name: spec for spec in specs}, messages)
    except (EngineError, OSError) as error:
        report.fail(str(error))
        return None
    print(f"system  {len(system.actors)} actors, {len(system.links)} links")
    return system


def compare_sends(system: System, results: list[Found], report: Report) -> None:
    """What cores sent in the searches is what system.toml says of actors with machines: no more, no less."""
    sent = {one for found in results for one in found.sent}
    declared = {one for one in system.sends() if system.actors[one.sender].spec is not None}
    for one in sorted(sent - declared):
        text = f"{one.sender} sends {one.message} to {one.receiver}; add it to a [[sends]]"
        report.fail(f"specs/system.toml: {text}")
    for one in sorted(declared - sent):
        text = f"no search has {one.sender} send {one.message} to {one.receiver}"
        report.fail(f"specs/system.toml: {text}; drop it from its [[sends]], or search it")


def _searches(specs: list[Spec], deep: bool, report: Report) -> list[tuple[Search, Found]]:
    results = []
    for path in sorted((SPECS / "search").glob("*.toml")):
        try:
            search = load_search(path)
        except EngineError as error:
            report.fail(str(error))
            continue
        if search.deep and not deep:
            continue
        if report.late():
            report.fail(f"{shown(path)}: not begun, the minutes are over")
            continue
        results.append((search, run_search(search, report)))
    searched = {taken.spec for _, found in results for taken in found.fired}
    for spec in specs:
        if spec.name not in searched:
            report.fail(f"{shown(spec.path)}: no search runs this machine; add one to specs/search")
    return results


def run_search(search: Search, report: Report) -> Found:
    """One search; a failure where it finds a violation or another number of states than its file says."""
    began = time.monotonic()
    found = Explorer(search).run()
    seconds = time.monotonic() - began
    print(
        f"search  {search.name:<24} {found.states} states, {found.edges} edges, {seconds:.1f} s", flush=True
    )
    report.searches.append(
        {"name": search.name, "states": found.states, "edges": found.edges, "seconds": round(seconds, 3)}
    )
    if found.violation is not None:
        report.fail(f"{search.name}: {found.violation.report()}")
    elif found.states != search.states:
        report.fail(
            f"{shown(search.path)} says {search.states} states and the search found {found.states}: if the "
            f"change is meant, write states = {found.states}; fewer may mean that something no longer happens"
        )
    return found


def _rows(specs: list[Spec], results: list[tuple[Search, Found]], report: Report) -> None:
    needed = 0
    total = sum(len(row.states) for spec in specs for row in spec.rows)

    def progress(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{line}"[:150], end="", file=sys.stderr, flush=True)

    for dropped in drop_rows(specs, results, progress):
        where = f"{shown(dropped.spec.path)}:{dropped.row.line}"
        report.rows.append(
            {"row": f"{where} {dropped.label()}", "noticed_by": dropped.search, "how": dropped.text}
        )
        if dropped.search is None:
            advice = "add a search or an invariant that needs it, or drop the row"
            report.fail(f"{where}: {dropped.label()} isn't needed: {dropped.text}; {advice}")
        else:
            needed += 1
        if report.late():
            report.fail(f"dropping rows stopped at {where}: the minutes are over")
            break
    progress("")
    print(f"rows    {needed} of {total} pairs of a row and a state are needed")
