"""Cases that go wrong, for the process that runs cases: it imports nothing more than this."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable

from bench.grammar_fuzz import Case


def _case(act: Callable[[], object], part: str) -> Case:
    def case(seed: int, say: Callable[[str], None]) -> Counter[str]:
        say(part)
        act()
        return Counter(checked=1)

    return case


def _killed() -> object:
    return os.kill(os.getpid(), signal.SIGKILL)


def planted() -> dict[str, Case]:
    """One of each."""
    return {
        "good": _case(lambda: None, "gate"),
        "hang": _case(lambda: time.sleep(60), "gate"),
        "slow compile": _case(lambda: time.sleep(60), "compile"),
        "crash": _case(_killed, "match"),
        "judge": _case(_killed, "judge"),
        "wrong": _case(lambda: [][1], "gate"),
    }
