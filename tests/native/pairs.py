"""Real rank processes for the exchange's tests, kept from one test to the next where they survive it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
RANK = Path(__file__).with_name("rank.py")
ANSWER_S = 60.0


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
        assert self.line() == "ready"

    def begin(self, plan: dict[str, Any]) -> None:
        """Gives it a plan."""
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
        return json.loads(line) if line else None

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
    """As many processes as were ever needed; the dead are replaced."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    def take(self, count: int) -> list[Process]:
        """Living processes without a plan."""
        for dead in [p for p in self._processes if p.child.poll() is not None]:
            dead.kill()
            self._processes.remove(dead)
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
