"""The server under test: started here with the flags given, or one that runs on this host already."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import orjson

from engine.children import die_with_parent
from engine.errors import ConfigError
from engine.soak.processes import owner_of, tree

HOST = "127.0.0.1"
READY_WITHIN_S = 300.0
STOP_WITHIN_S = 60.0
SERVE = (sys.executable, "-m", "engine", "serve")
WRONG = re.compile(r"traceback|exception|error|failed|failure|fatal|killed|panic|diverge|stalled|died", re.I)
"""A line of the log that matches is a violation."""

ROOM = ["--max-running-requests", "16", "--max-queued-requests", "32", "--chunked-prefill-size", "256"]
"""Of a server that is started here: a queue that a burst can fill, prompts that need several chunks."""


class Server:
    """Where to ask, and which processes answer.

    pid      of the api process
    folder   holds the log of a server that was started here
    """

    def __init__(self, url: str, log: Path | None = None) -> None:
        parts = urlsplit(url)
        if not parts.hostname or not parts.port:
            raise ConfigError(f"--url is {url!r}, but must be like http://127.0.0.1:30000")
        self.host, self.port = parts.hostname, parts.port
        self.child: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self._log = log
        self._read = 0
        self._rest = b""

    def find(self) -> None:
        """Finds the process of a server that runs already. raises ConfigError"""
        self.pid = owner_of(self.port)

    def start(self, flags: Sequence[str], command: Sequence[str], folder: Path) -> None:
        """Starts it, and returns once it takes requests. raises ConfigError where it doesn't come up"""
        self._log = folder / "server.log"
        full = [*command, "--host", self.host, "--port", str(self.port), *flags]
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C ends the soak, which then ends the server.
            self.child = subprocess.Popen(
                full, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
            )
        self.pid = self.child.pid
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s:
            if self.child.poll() is not None:
                raise ConfigError(f"the server ended with {self.child.returncode}: {self.tail()}")
            try:
                with urllib.request.urlopen(f"http://{self.host}:{self.port}/ready", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise ConfigError(f"the server was not ready within {READY_WITHIN_S:g} s: {self.tail()}")

    def tail(self) -> str:
        """The end of the log."""
        return "" if self._log is None else self._log.read_text(errors="replace")[-2000:]

    def wrong_lines(self) -> list[str]:
        """Lines of the log since the last call that tell of a fault."""
        if self._log is None:
            return []
        with self._log.open("rb") as log:
            log.seek(self._read)
            data = log.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [text for text in (line.decode(errors="replace") for line in lines) if WRONG.search(text)]

    def stop(self, shared: Iterable[str]) -> tuple[int, list[str]]:
        """(exit code after SIGTERM, what is left of it). Only for a server that was started here.

        shared  shared-memory objects that its processes have mapped
        """
        assert self.child is not None
        known = tree(self.pid)
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            code = self.child.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            return -signal.SIGKILL, [
                f"it had not ended {STOP_WITHIN_S:g} s after SIGTERM: {self.tail()[-500:]}"
            ]
        left = [f"process {pid} still runs" for pid in known if tree(pid).get(pid) == known[pid]]
        left += [f"shared memory {name}" for name in sorted(shared) if Path(name).exists()]
        return code, left

    def kill(self) -> None:
        """Whatever happened: the child doesn't outlive the soak."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def has_draft(model_path: str) -> bool:
    """Whether a checkpoint holds draft stages."""
    try:
        index = orjson.loads((Path(model_path) / "model.safetensors.index.json").read_bytes())
        return any(name.startswith("mtp.") for name in index["weight_map"])
    except (OSError, ValueError, KeyError):
        return False


def vocabulary_of(model_path: str) -> int:
    """Ids of a checkpoint's model. raises ConfigError"""
    try:
        return int(orjson.loads((Path(model_path) / "config.json").read_bytes())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model_path}/config.json names no vocab_size: {error!r}") from error


def log_folder() -> TemporaryDirectory[str]:
    """Where the log of a server that is started here lies while it runs."""
    return TemporaryDirectory(prefix="soak-")
