"""Parts of a measurement, each with a time-out, in a process that a bad part can't take down with it.

A kernel that hangs can't be interrupted, and after an illegal address nothing on a device works any more: so
what runs the parts is a process of its own, and whenever a part fails the next one begins in a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

PR_SET_PDEATHSIG = 1
START_S = 120.0
"""What a process may take until it begins with its first part: imports, on a busy machine."""
EARLY_S = 2.0
"""So long before its time-out a part's stacks are printed."""
TOLD = 2000
"""Characters of a failure that are kept: its end, where the cause is."""


@dataclass(frozen=True)
class Part:
    """`call(*args)` yields results one by one; it is a module's function, and results can be pickled.

    limit_s  from its begin, or its last result, to the next one
    """

    name: str
    call: Callable[..., Iterator[Any]]
    args: tuple[Any, ...]
    limit_s: float


@dataclass
class Outcome:
    """What a part gave, also where it failed later; why it failed, or empty; how long it took."""

    results: list[Any] = field(default_factory=list)
    failed: str = ""
    seconds: float = 0.0


class Stage:
    """Runs parts, one after the other.

    say       prints a line
    within_s  no part begins or goes on later than so many seconds from now; 0: no limit
    """

    def __init__(self, say: Callable[[str], None], within_s: float = 0.0) -> None:
        self._say, self._within_s = say, within_s
        self._until = time.monotonic() + within_s if within_s else math.inf
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, part: Part) -> Outcome:
        """The part's outcome; never raises for what the part does."""
        began, outcome = time.monotonic(), Outcome()
        if self.late:
            outcome.failed = f"not begun: {self._within_s:g} s are over"
        else:
            self._say(f"{part.name} ...")
            left_s = self._until - time.monotonic()
            # The part's own stacks are printed before its time is over, whichever time that is.
            soon = replace(part, limit_s=min(part.limit_s, left_s))
            outcome.failed = self._listen(soon, outcome.results)
        outcome.seconds = round(time.monotonic() - began, 1)
        if outcome.failed:
            self.close()
        told = f"failed: {last_line(outcome.failed)}" if outcome.failed else f"{len(outcome.results)} results"
        self._say(f"{part.name}: {told} ({outcome.seconds} s)")
        return outcome

    @property
    def late(self) -> bool:
        """Whether no part may begin any more."""
        return time.monotonic() >= self._until

    def _listen(self, part: Part, results: list[Any]) -> str:
        """Adds results as they come. Returns why the part failed."""
        pipe = self._opened()
        try:
            pipe.send(part)
            if not pipe.poll(START_S):
                return f"not begun within {START_S:g} s"
            pipe.recv()
            while not self.late and pipe.poll(min(part.limit_s, self._until - time.monotonic())):
                kind, value = pipe.recv()
                if kind == "result":
                    results.append(value)
                else:
                    return str(value)
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(5)
            return f"its process ended with {self._process.exitcode}"
        if self.late:
            return f"{self._within_s:g} s are over, after {len(results)} results"
        return f"nothing for {part.limit_s:g} s, after {len(results)} results"

    def _opened(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, far = context.Pipe()
            self._process = context.Process(target=_live, args=(far, os.getpid()))
            self._process.start()
            far.close()
        return self._pipe

    def close(self) -> None:
        """Ends the process, and those that it started."""
        process, self._process, pipe, self._pipe = self._process, None, self._pipe, None
        if process is None or pipe is None:
            return
        pipe.close()
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def run_parts(
    parts: Sequence[Part], say: Callable[[str], None] = print, within_s: float = 0.0
) -> dict[str, Outcome]:
    """Outcomes by the parts' names. within_s: as in Stage"""
    stage = Stage(say, within_s)
    try:
        return {part.name: stage.run(part) for part in parts}
    finally:
        stage.close()


def last_line(text: str) -> str:
    """Of a traceback, which tells the cause."""
    return (text.strip().splitlines() or [""])[-1]


def failures(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Why parts failed, by name."""
    return {name: outcome.failed[-TOLD:] for name, outcome in outcomes.items() if outcome.failed}


def _live(pipe: Connection, parent: int) -> None:
    """The process's life: parts come in, results go out, until the other side closes."""
    # A group of its own, which is ended with whatever a part has started; and nobody is left behind on a
    # device where the parent is killed.
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    while True:
        try:
            part: Part = pipe.recv()
        except EOFError:
            return
        pipe.send(("begun", ""))
        told = ("ended", "")
        try:
            for result in _watched(part):
                pipe.send(("result", result))
        except Exception:
            told = ("failed", traceback.format_exc())
        pipe.send(told)


def _watched(part: Part) -> Iterator[Any]:
    """The part's results; where one is late, where every thread stands goes to standard error."""
    results = iter(part.call(*part.args))
    while True:
        faulthandler.dump_traceback_later(max(0.1, part.limit_s - EARLY_S))
        try:
            result = next(results)
        except StopIteration:
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
        yield result
