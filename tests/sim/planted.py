"""Faults planted in actions, guards and shells, each of which a replay or a search must find.

`python -m tests.sim.planted` looks for each and writes specs/scenarios/planted.md: what, and who found it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import pytest

from engine.actors import core
from engine.fsm.explore import Explorer
from engine.fsm.owners import SPECS
from engine.fsm.search import load_search
from engine.sim.many import Seeds
from engine.sim.run import replay
from engine.sim.scenario import SCENARIOS, load_scenario, plan_of
from tests.sim import plants_drafts, plants_edge, plants_rank

TABLE = SCENARIOS / "planted.md"
SEEDS = 12
TEXT_CHARS = 110

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Who found a planted fault: a command, and what it said first."""

    command: str
    text: str


@dataclass(frozen=True, slots=True)
class Planted:
    """One planted fault. `look`: scenarios in which it is looked for, the likeliest first."""

    name: str
    say: str
    plant: Plant
    look: tuple[str, ...]


def all_planted() -> list[Planted]:
    """Every planted fault, in the table's order: the docstring says what, its last line where to look."""
    found = []
    for module in (plants_rank, plants_drafts, plants_edge):
        for name, plant in vars(module).items():
            if (
                callable(plant)
                and getattr(plant, "__module__", "") == module.__name__
                and not name.startswith("_")
            ):
                say, _, look = (plant.__doc__ or "").strip().partition("\n")
                found.append(Planted(name, say, plant, tuple(look.split())))
    return found


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Within the block the fault is there; compiled tables, which hold sound guards and actions, are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_tables", {})
        plant(patch)
        yield


def look_for(one: Planted, seeds: int = SEEDS) -> Found | None:
    """The first scenario, or else the first search, that notices the fault."""
    with planted(one.plant):
        for scenario in one.look:
            loaded = load_scenario(scenario)
            for seed in range(seeds):
                violation = replay(plan_of(loaded, seed), seed).violation
                if violation is not None:
                    return Found(Seeds(scenario, seed, seed).command(), f"{violation.id}: {violation.text}")
        return _search()


def _search() -> Found | None:
    for path in sorted((SPECS / "search").glob("*.toml")):
        text = "" if load_search(path).deep else search_finds(path.stem)
        if text:
            return Found(f"python -m engine check: {path.stem}", text)
    return None


def search_finds(name: str) -> str | None:
    """What the search of this name finds; None where it finds nothing."""
    search = load_search(SPECS / "search" / f"{name}.toml")
    violation = Explorer(search, max_states=3 * search.states + 1000).run().violation
    return None if violation is None else violation.text


def table(rows: Sequence[tuple[Planted, Found | None]]) -> str:
    """Markdown."""
    lines = [
        "# Planted faults",
        "",
        f"{len(rows)} faults in actions, guards and shells (tests/sim/plants_*.py). Each is found.",
        "Written by `python -m tests.sim.planted`; tests/sim/test_planted.py replays each command below.",
        "",
        "| fault | planted | found by | as |",
        "|---|---|---|---|",
    ]
    for one, found in rows:
        text = "" if found is None else shorten(found.text.replace("|", "/"), TEXT_CHARS, placeholder=" ...")
        command = "nobody" if found is None else f"`{found.command}`"
        lines.append(f"| {one.name} | {one.say} | {command} | {text} |")
    return "\n".join(lines) + "\n"


def recorded(path: Path = TABLE) -> dict[str, str]:
    """Command by fault, of the committed table."""
    rows = [line.split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[2].strip("`") for row in rows[1:]}


def main() -> int:
    """Looks for all; 1 where one isn't found."""
    rows = []
    for one in all_planted():
        found = look_for(one)
        rows.append((one, found))
        print(
            f"{one.name:<36} {found.command if found else 'NOBODY'}  {found.text[:90] if found else ''}",
            flush=True,
        )
    TABLE.write_text(table(rows))
    return 1 if any(found is None for _, found in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
