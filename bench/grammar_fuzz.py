"""`python -m engine bench grammar-fuzz`: schemas, patterns, grammars and tags, most of them damaged.

Each goes through the gate and the compiler in a process of its own with the limits of a compile worker. What
is accepted must compile, within a worker's deadline, and its texts must be those of an independent reading;
what is refused must say why. A crash, a hang, or a text that is let through or held back fails the run, which
names the kind and the seed that show it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import EngineError

MEMORY_BYTES = 4 << 30
"""As a compile worker has it."""

WITHIN_S = {"start": 120.0, "gate": 30.0, "compile": 8.0, "match": 30.0, "judge": 30.0}
"""What each part of a case may take. The gate takes a second of a processor that others use, too."""

FAULTS = ("crash", "hang", "found")
MOST_SHOWN = 20


class FuzzFound(EngineError):
    """A case that must not be."""


Case = Callable[[int, Callable[[str], None]], Counter[str]]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Counts by kind; raises FuzzFound at the end where there was a crash, a hang or a fault."""
    from tests.grammar.gate.fuzz.cases import CASES

    minutes = 0.05 if args.quick else args.minutes
    fuzz, until_s = Fuzz(dict.fromkeys(CASES, cases)), 0.0
    number = first = args.seed * 1_000_000_000
    try:
        while number == first or time.monotonic() < until_s:
            for kind in CASES:
                fuzz.one(kind, number)
            if number == first:  # The process is up now.
                until_s = time.monotonic() + 60 * minutes
            number += 1
    finally:
        fuzz.close()
    figures = fuzz.figures() | {"minutes": minutes, "seed": args.seed}
    if fuzz.shown:
        raise FuzzFound(f"{len(fuzz.shown)} cases: " + "\n".join(fuzz.shown))
    return figures


def cases() -> dict[str, Case]:
    """All of them; imported in the process that runs them."""
    from tests.grammar.gate.fuzz.cases import CASES

    return CASES


class Fuzz:
    """Runs cases one by one in a process that is replaced where it ends or doesn't answer.

    load    of a kind: gives the cases, in the other process
    within  seconds of a part: start, gate, compile, match, judge
    shown   what was found, for a person
    """

    def __init__(
        self, load: dict[str, Callable[[], dict[str, Case]]], within: dict[str, float] | None = None
    ) -> None:
        self.counts: dict[str, Counter[str]] = {kind: Counter() for kind in load}
        self.longest_s: dict[str, dict[str, float]] = {kind: {} for kind in load}
        self.shown: list[str] = []
        self._load = load
        self._within = within or WITHIN_S
        self._process: Any = None
        self._link: Connection | None = None

    def one(self, kind: str, seed: int) -> None:
        """One case and what came of it."""
        link = self._link if self._link is not None else self._start()
        link.send((self._load[kind], kind, seed))
        part, began_s = "start", time.monotonic()
        self.counts[kind]["cases"] += 1
        while True:
            if not link.poll(self._within[part]):
                return self._ended(kind, seed, part, "hang", f"no answer for {self._within[part]:g} s")
            try:
                name, told = link.recv()
            except EOFError:
                self._process.join()
                return self._ended(kind, seed, part, "crash", f"exit code {self._process.exitcode}")
            now_s = time.monotonic()
            if part != "start":
                longest = self.longest_s[kind]
                longest[part] = max(longest.get(part, 0.0), now_s - began_s)
            if name == "part":
                part, began_s = told, now_s
            if name == "counts":
                self.counts[kind].update(told)
                return None
            if name == "found":
                return self._note(kind, seed, "found", told)

    def figures(self) -> dict[str, Any]:
        """Of each kind, and of all."""
        kinds = {
            kind: dict(sorted(found.items()))
            | {
                f"longest_{part}_s": round(seconds, 3)
                for part, seconds in sorted(self.longest_s[kind].items())
            }
            for kind, found in self.counts.items()
        }
        total = sum(self.counts.values(), Counter())
        return {"kinds": kinds, **{name: total[name] for name in ("cases", "checked", "texts", *FAULTS)}}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._link = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._link, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far,), daemon=True)
        self._process.start()
        far.close()
        return self._link

    def _ended(self, kind: str, seed: int, part: str, fault: str, why: str) -> None:
        self.close()
        if part == "compile" and fault == "hang":
            self.counts[kind]["timed_out"] += 1  # As a worker is ended that takes too long.
        elif part == "judge":
            self.counts[kind]["undecided"] += 1
        else:
            self._note(kind, seed, fault, f"in {part}: {why}")

    def _note(self, kind: str, seed: int, fault: str, why: str) -> None:
        self.counts[kind][fault] += 1
        if len(self.shown) < MOST_SHOWN:
            self.shown.append(f"{kind} {seed}: {fault} {why}")


def _serve(link: Connection) -> None:
    """Cases until the other side is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            load, kind, seed = link.recv()
        except EOFError:
            return
        try:
            told = load()[kind](seed, lambda part: link.send(("part", part)))
        except Exception as error:
            link.send(("found", f"{type(error).__name__}: {error}"))
        else:
            link.send(("counts", dict(told)))
