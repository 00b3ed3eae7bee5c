"""Parts of a measurement, and ranks of one, that fail, die or hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def counts(upto: int) -> Iterator[tuple[int, int]]:
    for number in range(upto):
        yield number, os.getpid()


def breaks(behind: int) -> Iterator[int]:
    yield from range(behind)
    raise ValueError("an illegal address")


def dies() -> Iterator[int]:
    yield 1
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(pid_file: str) -> Iterator[int]:
    """Blocks all signals that Python could answer, with a child of its own."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    Path(pid_file).write_text(str(child))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield 7
    time.sleep(60)


@dataclass(frozen=True)
class Asked:
    """As bench.step_case.Case, of a module that needs no torch: processes begin in no time."""

    kind: str
    rows: int
    context: int = 100


@dataclass(frozen=True)
class AskedJob:
    """As bench.step_rank.Job."""

    cases: Sequence[Asked]
    parity: bool
    ranks: int = 2
    layers: int = 4

    @property
    def settings(self) -> SimpleNamespace:
        """As far as the parent reads them."""
        return SimpleNamespace(device="cpu")


def planted_rank(rank: int, job: Any, meet_at: str, pipe: Connection) -> None:
    """A rank of `bench step`, of which the second one differs, hangs, dies and fails."""
    if job.parity:
        pipe.send(("parity", {}) if rank == 0 else ("failed", "Traceback ...\noperations differ"))
        time.sleep(60)
    pipe.send(("loaded", {"rates": {"read": 1.0 + rank}}))
    for case in job.cases:
        if rank == 1 and case.kind == "decode" and case.rows > 1:
            if case.rows == 2:
                time.sleep(60)
            elif case.rows == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            pipe.send(("failed", "an illegal address"))
            return
        row = {"kind": case.kind, "rows_per_rank": case.rows, "context": case.context, "layers": job.layers}
        row |= {"graph": False, "ms": 1.0, "floor_ms": 1.0, "bound": "bytes", "ratio": 1.0}
        pipe.send(("row", row | {"distinct_experts": 1.0}))


def unloadable_rank(rank: int, job: Any, meet_at: str, pipe: Connection) -> None:
    """A rank of `bench step` whose weights find no room."""
    if job.parity:
        pipe.send(("parity", {}))
    pipe.send(("failed", "no room for the weights"))
