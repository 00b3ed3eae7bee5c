"""A server of trivial.py in processes of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

TRIVIAL = Path(__file__).with_name("trivial.py")
ROOT = TRIVIAL.parents[2]
WITHIN_S = 30.0
"""For what comes in a moment, on a machine that may be busy; an endless stream takes longer than this."""

STARTS_WITHIN_S = 90.0


class Server:
    """A server of trivial.py, and what is known of its processes."""

    def __init__(self, model: Path, drain_s: float = 20.0, **environment: str) -> None:
        # Bound but not listening, it keeps the port from everyone but the server, which asks for it by name.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.port = self._port.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, TRIVIAL, "serve", str(self.port), model, str(drain_s)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )

    def wait_ready(self) -> int:
        """Waits until requests are taken; returns the rank's process id."""
        deadline = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                # Plain HTTP needs no certificates, and reading them takes a tenth of a second a client.
                if httpx.get(self.url + "/ready", verify=False).status_code == 200:
                    return self.rank
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self.end()}")

    def wait_starting(self) -> None:
        """Waits until the server says that the model is loading."""
        assert self.process.stderr is not None
        assert any("nothing to load" in line for line in iter(self.process.stderr.readline, ""))
        answer = httpx.get(self.url + "/ready", timeout=WITHIN_S)
        assert (answer.status_code, "the model is loading" in answer.text) == (503, True)

    def wait_draining(self, client: httpx.Client) -> None:
        """Waits until the server knows that it is to end: new requests are refused from then on."""
        deadline = time.monotonic() + WITHIN_S
        while client.get("/ready").status_code == 200:
            assert time.monotonic() < deadline, "not draining"

    @property
    def rank(self) -> int:
        """The first rank's process id."""
        return self.children("trivial.py rank")[0]

    def children(self, command: str = "") -> list[int]:
        """Process ids of the server's children whose command line has this in it, in their order."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sorted(pid for pid in map(int, found) if command in command_line(pid))

    def post(self, body: dict[str, object]) -> httpx.Response:
        """A completion."""
        return httpx.post(self.url + "/v1/completions", json=body, timeout=WITHIN_S, verify=False)

    def signal(self, number: int, times: int = 1) -> None:
        """Signals it, and waits for each to be taken: two of a kind that wait are one."""
        for _ in range(times):
            self.process.send_signal(number)
            status = Path(f"/proc/{self.process.pid}/status")
            while int(status.read_text().partition("ShdPnd:")[2].split()[0], 16):
                time.sleep(0.01)

    def end(self, within_s: float = WITHIN_S) -> tuple[int, str]:
        """(exit code, what it printed) once it has ended."""
        _, printed = self.process.communicate(timeout=within_s)
        return self.process.returncode, printed

    def close(self) -> None:
        """Kills what still lives."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self._port.close()


def command_line(pid: int) -> str:
    """The process's, with spaces; empty where it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wait_for(true: Callable[[], bool], within_s: float = WITHIN_S) -> bool:
    """Whether it comes true within the time."""
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def gone(pid: int, within_s: float = WITHIN_S) -> bool:
    """Whether this process has ended within the time (one that waits for its parent's notice has)."""

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return wait_for(ended, within_s)
