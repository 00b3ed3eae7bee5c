"""Two real processes: ready, stopped, killed, broken; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.actors.servers import ROOT, TRIVIAL, WITHIN_S, Server, gone

pytestmark = pytest.mark.slow
PROMPT = {"model": "nano", "prompt": "Hello", "max_tokens": 5}
LONG = {**PROMPT, "max_tokens": 7000, "ignore_eos": True, "stream": True}


@pytest.fixture
def started() -> Iterator[list[Server]]:
    """Servers of a test; whatever lives after it is killed."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.close()


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
    model: Path, started: list[Server], tmp_path: Path
) -> None:
    started.append(server := Server(model, drain_s=60.0, TRIVIAL_GATE=str(tmp_path / "go on")))
    server.wait_ready()
    body = {**LONG, "max_tokens": 40}
    # The client is made before: what comes a second after the signal would find nobody.
    with (
        httpx.Client(base_url=server.url, timeout=WITHIN_S, verify=False) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait_draining(client)
        refused = client.post("/v1/completions", json=PROMPT)
        (tmp_path / "go on").touch()
        rest = events("\n".join(lines))
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert server.end()[0] == 0


@pytest.mark.parametrize(("drain_s", "signals"), [(0.3, 1), (600.0, 2)])
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
    started.append(server := Server(model, TRIVIAL_FAULT="hang", TRIVIAL_HANG_S="1"))
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
