"""Parts of a measurement that fail, die or hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


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
