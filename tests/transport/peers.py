"""This process at one end, a child of peer.py at the other one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.transport import Layout
from engine.transport.connections import Connection, Identity, Rendezvous, identity_of
from tests.transport.faults import SOON_S, TAKEN

PEER = Path(__file__).with_name("peer.py")
SESSION = bytes(range(1, 17))
ANSWER_S = 100.0


class Peers:
    """One process of peer.py, which forks a child for each plan."""

    def __init__(self, *arguments: str) -> None:
        self.rendezvous = Rendezvous()
        self._read = b""
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._line() == "ready"

    def begin(self, role: str, layout: Layout, **more: Any) -> Identity:
        """Starts a child with a plan; who it is."""
        own = identity_of(os.getpid())
        told = {
            "kind": int(layout.kind),
            "spans": layout.spans,
            "pool_bytes": layout.pool_bytes,
            "granularity": layout.granularity,
            "generation": layout.generation,
            "device": layout.device.hex(),
        }
        plan = {"path": self.rendezvous.path, "session": SESSION.hex(), "peer": [own.pid, own.start_ticks]}
        plan |= {
            "role": role,
            "layout": told,
            "fault": None,
            "at": 0,
            "within_s": SOON_S,
            "batches": 1,
        } | more
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(plan).encode() + b"\n")
        return Identity(*json.loads(self._line()))

    def meet(self, who: Identity) -> Connection:
        """The connection that the child has made."""
        end = self.rendezvous.accept(SESSION, 0, 1, who, SOON_S)
        os.kill(who.pid, TAKEN)
        return end

    @contextlib.contextmanager
    def meeting(self, role: str, layout: Layout, **more: Any) -> Iterator[Connection]:
        """The connection to a new child."""
        with self.meet(self.begin(role, layout, **more)) as end:
            yield end

    def result(self) -> dict[str, Any]:
        """What came of the plan."""
        return dict(json.loads(self._line()))

    def close(self) -> None:
        """Ends it."""
        self.rendezvous.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _line(self) -> str:
        out = self._process.stdout
        assert out is not None
        while b"\n" not in self._read:
            ready, _, _ = select.select([out], [], [], ANSWER_S)
            assert ready, f"the peer said nothing for {ANSWER_S} s"
            more = os.read(out.fileno(), 65_536)
            assert more, "the peer has ended"
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()
