"""Two real processes: ready, stopped, killed, broken; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow
TRIVIAL = Path(__file__).with_name("trivial.py")
ROOT = TRIVIAL.parents[2]
PROMPT = {"model": "nano", "prompt": "Hello", "max_tokens": 5}
LONG = {**PROMPT, "max_tokens": 7000, "ignore_eos": True, "stream": True}
WITHIN_S = 30.0
"""For what comes in a moment, on a machine that may be busy; an endless stream takes longer than this."""


class Server:
    """A server of trivial.py, and what is known of its processes."""

    def __init__(self, model: Path, drain_s: float = 20.0, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, TRIVIAL, "serve", str(self.port), model, str(drain_s)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )

    def wait_ready(self) -> int:
        """Waits until requests are taken; returns the rank's process id."""
        deadline = time.monotonic() + 60
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
        answer = httpx.get(self.url + "/ready")
        assert (answer.status_code, "the model is loading" in answer.text) == (503, True)

    @property
    def rank(self) -> int:
        """The first rank's process id."""
        return self.children("trivial.py rank")[0]

    def children(self, command: str = "") -> list[int]:
        """Process ids of the server's children whose command line has this in it, in their order."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in found}
        return sorted(
            pid
            for pid, line in lines.items()
            if line.exists() and command in line.read_bytes().replace(b"\0", b" ").decode()
        )

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
            time.sleep(0.1)

    def end(self, within_s: float = WITHIN_S) -> tuple[int, str]:
        """(exit code, what it printed) once it has ended."""
        _, printed = self.process.communicate(timeout=within_s)
        return self.process.returncode, printed


@pytest.fixture
def started() -> Iterator[list[Server]]:
    """Servers of a test; whatever lives after it is killed."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        if server.process.stderr is not None:
            server.process.stderr.close()


def gone(pid: int, within_s: float = WITHIN_S) -> bool:
    """Whether this process has ended within the time (one that waits for its parent's notice has)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def events(text: str) -> list[str]:
    """Data of an event stream."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def test_a_signal_ends_an_idle_server_cleanly(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model))
    rank = server.wait_ready()
    assert server.post(PROMPT).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert gone(rank)


def test_a_running_request_ends_whole_and_new_ones_are_refused_while_draining(
    model: Path, started: list[Server]
) -> None:
    started.append(server := Server(model))
    server.wait_ready()
    body = {**LONG, "max_tokens": 200}
    # The client is made before: what comes a second after the signal would find nobody.
    with (
        httpx.Client(base_url=server.url, timeout=WITHIN_S, verify=False) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        refused = client.post("/v1/completions", json=PROMPT)
        rest = events("\n".join(lines))
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert server.end()[0] == 0


@pytest.mark.parametrize(("drain_s", "signals"), [(0.3, 1), (20.0, 2)])
def test_the_drain_limit_or_a_second_signal_cuts_what_runs_with_an_error_event(
    model: Path, started: list[Server], drain_s: float, signals: int
) -> None:
    started.append(server := Server(model, drain_s))
    rank = server.wait_ready()
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=WITHIN_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.signal(signal.SIGINT, signals)
        rest = events("\n".join(lines))
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["message"] == "the server is stopping"
    assert server.end()[0] == 0
    assert gone(rank)


def test_a_killed_rank_ends_streams_with_an_error_and_the_server_with_a_report(
    model: Path, started: list[Server]
) -> None:
    started.append(server := Server(model))
    rank = server.wait_ready()
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=WITHIN_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(rank, signal.SIGKILL)
        rest = events("\n".join(lines))
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["message"] == "rank 0 has ended: was killed by SIGKILL"
    code, printed = server.end()
    assert code == 1
    assert "rank0 was killed by SIGKILL" in printed


def test_a_killed_server_takes_its_rank_with_it(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model))
    rank = server.wait_ready()
    server.process.kill()
    assert gone(rank)


def test_a_broken_device_is_the_first_cause_that_is_reported(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model, TRIVIAL_FAULT="break"))
    server.wait_ready()
    answer = server.post({**PROMPT, "max_tokens": 100})
    assert answer.status_code == 500
    assert "rank 0 has ended: ended with exit code 1" in answer.text
    code, printed = server.end()
    assert code == 1
    assert printed.count("RuntimeError: an illegal address was encountered") == 1
    assert printed.index("an illegal address") < printed.index("rank0 ended with exit code 1")
    assert "flight recorder of rank0" in printed


def test_a_silent_device_is_given_up_and_every_stack_is_shown(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model, TRIVIAL_FAULT="hang"))
    server.wait_ready()
    answer = server.post({**PROMPT, "max_tokens": 100})
    assert answer.status_code == 500
    code, printed = server.end()
    assert code == 1
    assert "in execute" in printed
    assert "rank0 ended in state stalled" in printed


def test_a_rank_that_cant_load_ends_the_server_with_its_cause(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model, TRIVIAL_FAULT="load"))
    code, printed = server.end()
    assert code == 1
    assert "rank0: CheckpointError: layers.0.attn.wq_a.weight is missing" in printed
    assert "Traceback" not in printed


def test_a_failed_actor_of_the_server_ends_streams_with_an_error_and_is_reported_with_its_rows(
    model: Path, started: list[Server]
) -> None:
    started.append(server := Server(model, TRIVIAL_FAULT="detok"))
    rank = server.wait_ready()
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=WITHIN_S) as answer:
        rest = events("\n".join(answer.iter_lines()))
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["message"] == "the server has failed"
    code, printed = server.end()
    assert code == 1
    assert "actor detok failed in state running on StepOut(" in printed
    assert "running StepOut" in printed
    assert gone(rank)


def test_a_signal_while_the_model_loads_ends_the_server_cleanly(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model, TRIVIAL_FAULT="slow load"))
    server.wait_starting()
    rank = server.rank
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert gone(rank)


def test_a_busy_port_is_refused_before_anything_is_started(model: Path, started: list[Server]) -> None:
    server = Server(model)
    started.append(server)
    server.wait_ready()
    second = subprocess.run(
        [sys.executable, TRIVIAL, "serve", str(server.port), model, "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=WITHIN_S,
        check=False,
    )
    assert second.returncode == 2
    assert f"can't listen on 127.0.0.1:{server.port}: Address already in use" in second.stderr
