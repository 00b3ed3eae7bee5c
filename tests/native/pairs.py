"""Real rank processes for the exchange's tests, kept from one test to the next where they survive it."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SHARED_MEMORY = Path("/dev/shm")
RANK = Path(__file__).with_name("rank.py")
ANSWER_S = 100.0
INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def steps(draw: st.DrawFn, ranks: int = 2) -> list[list[dict[str, Any]]]:
    """Steps by rank: verification tiers in some epochs; ranks that pause, sleep, or wait to be asked."""
    channels = [0]
    for _ in range(draw(st.integers(0, 9))):
        channels += [1, 0] if draw(st.booleans()) else [0]
    both: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for channel, epoch in zip(channels, itertools.accumulate(c == 0 for c in channels), strict=True):
        asked = draw(st.sampled_from([None, None, *range(ranks)]))
        for rank in range(ranks):
            how = "asked" if rank == asked else draw(st.sampled_from(["spin", "sleep"]))
            words = draw(st.lists(INT64, min_size=1, max_size=1)) * (1 if channel else 7)
            pause_us = draw(st.sampled_from([0, 0, 100, 2000]))
            both[rank].append(
                {
                    "channel": channel,
                    "epoch": epoch - 1,
                    "values": words,
                    "how": how,
                    "pause_us": pause_us,
                    "fault": None,
                }
            )
    return both


class Process:
    """One process of rank.py."""

    def __init__(self, *before: str) -> None:
        self.child = subprocess.Popen(
            [*before, sys.executable, str(RANK)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self.busy = False
        assert self.line() == "ready"

    def begin(self, plan: dict[str, Any]) -> None:
        """Gives it a plan; it is busy until its result is read."""
        self.busy = True
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(plan) + "\n")
        self.child.stdin.flush()

    def line(self) -> str:
        """The next line that it prints; empty where it has ended."""
        out = self.child.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], ANSWER_S)
        assert ready, f"process {self.child.pid} said nothing for {ANSWER_S} s"
        return out.readline().strip()

    def result(self) -> dict[str, Any] | None:
        """What came of the plan; None: it was killed."""
        line = self.line()
        self.busy = False
        return json.loads(line) if line else None

    def has_joined(self, session: str) -> bool:
        """Whether it has the session's page mapped."""
        return session in Path(f"/proc/{self.child.pid}/maps").read_text()

    def resume(self) -> None:
        """Ends a SIGSTOP."""
        self.child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it for good."""
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


class Pool:
    """As many processes as were ever needed; the dead are replaced, and who a failed test left busy."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    def take(self, count: int) -> list[Process]:
        """Living processes without a plan."""
        for lost in [p for p in self._processes if p.busy or p.child.poll() is not None]:
            lost.kill()
            self._processes.remove(lost)
        while len(self._processes) < count:
            self._processes.append(Process())
        return self._processes[:count]

    def close(self) -> None:
        """Ends all."""
        for process in self._processes:
            process.kill()


def objects(session: str) -> list[Path]:
    """What the session has under a name."""
    return list(SHARED_MEMORY.glob(f"*{session}*"))
