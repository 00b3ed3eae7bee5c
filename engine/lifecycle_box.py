"""A process's last words: a file without a name, written by the process, read by the one that started it.

What a dying process says stays there however it ends, native faults included, so that one report can hold the
words of all. At most WORDS_BYTES of it are read.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable

from engine.actors.process import report_to_stderr
from engine.errors import DeviceFailed, EngineError

WORDS_BYTES = 32 << 10
DUMP = signal.SIGUSR1
"""Makes a process that has a box write there where all its threads stand, even while it hangs."""


def create() -> int:
    """The descriptor of an empty box."""
    return os.memfd_create("last words")


def writer_of(descriptor: int) -> Callable[[str], None]:
    """Takes a text; from now on the process's fatal faults and its answer to DUMP are written there, too."""
    faulthandler.enable(descriptor)
    faulthandler.register(DUMP, descriptor)

    def write(text: str) -> None:
        data = text.encode("utf-8", "replace")[:WORDS_BYTES]
        os.write(descriptor, data + b"\n")

    return write


def words_in(descriptor: int) -> str:
    """What the box holds, which is closed; empty where its process said nothing. -1: there is no box."""
    if descriptor < 0:
        return ""
    try:
        return os.pread(descriptor, WORDS_BYTES, 0).decode("utf-8", "replace").rstrip()
    finally:
        os.close(descriptor)


def report(
    name: str, group: BaseExceptionGroup[BaseException], say: Callable[[str], None] = report_to_stderr
) -> None:
    """The first cause of a process's end. Our own errors say all in their text, others by traceback."""
    for error in leaves(group):
        cause = error.__cause__ if isinstance(error, DeviceFailed) and error.__cause__ else error
        if isinstance(cause, EngineError):
            say(f"{name}: {type(cause).__name__}: {cause}")
        else:
            say(f"{name} failed:\n" + "".join(traceback.format_exception(cause)).rstrip())


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group, its groups opened."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
