"""Real processes, killed, stopped and signalled at bad moments: a bounded end, one report, nothing left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.actors.servers import wait_for
from tests.actors.test_processes import PROMPT, ROOT, TRIVIAL, WITHIN_S, Server, gone
from tests.actors.test_processes import started as started
from tests.actors.test_rank_processes import Stream
from tests.actors.trivial import QUEUED, SLOTS

pytestmark = pytest.mark.slow


def stream_of(server: Server) -> Stream:
    """An endless stream that has begun."""
    stream = Stream(server, 0)
    assert stream.begun.wait(WITHIN_S)
    return stream


def test_a_rank_that_stands_still_is_given_up_and_its_client_hears_it(
    model: Path, started: list[Server]
) -> None:
    started.append(server := Server(model, TRIVIAL_WATCHDOG_S="4", TRIVIAL_HANG_S="60"))
    rank = server.wait_ready()
    stream = stream_of(server)
    os.kill(rank, signal.SIGSTOP)
    assert stream.error() == "rank 0 has ended: was killed by SIGKILL"
    code, printed = server.end()
    assert code == 1
    assert "rank0 gave no sign of life for" in printed
    assert printed.count("first cause: rank0 was killed by SIGKILL: it gave no sign of life") == 1
    assert gone(rank)


def test_a_drain_with_a_device_that_never_answers_ends_by_force_and_in_time(
    model: Path, started: list[Server]
) -> None:
    """Nobody has lost patience, and no watchdog has struck: the limits of drain and stop are enough."""
    limits = {"TRIVIAL_WATCHDOG_S": "300", "TRIVIAL_STOP_S": "1.5"}
    started.append(server := Server(model, drain_s=1.0, TRIVIAL_FAULT="hang", **limits))
    rank = server.wait_ready()
    stream = stream_of(server)
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert stream.error() == "the server is stopping"
    assert stream.over_s - began_s > 0.9
    code, printed = server.end()
    assert code == 3
    assert time.monotonic() - began_s > 2.4
    assert "first cause" not in printed
    assert gone(rank)


def test_a_third_signal_kills_what_doesnt_obey_and_the_exit_code_says_forced(
    model: Path, started: list[Server]
) -> None:
    # Nothing else would end it: the limits of drain, stop and silence are minutes.
    limits = {"TRIVIAL_WATCHDOG_S": "300", "TRIVIAL_STOP_S": "300"}
    started.append(server := Server(model, drain_s=300.0, **limits))
    rank = server.wait_ready()
    os.kill(rank, signal.SIGSTOP)
    server.signal(signal.SIGTERM, 3)
    code, printed = server.end()
    assert code == 3
    assert "first cause" not in printed
    assert gone(rank)


def test_a_killed_compile_worker_is_replaced_and_nobody_notices(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model))
    server.wait_ready()
    assert wait_for(lambda: server.children("engine.grammar.worker") != [])
    workers = server.children("engine.grammar.worker")
    os.kill(workers[0], signal.SIGKILL)
    assert server.post(PROMPT).status_code == 200
    assert wait_for(lambda: server.children("engine.grammar.worker") not in ([], workers))
    fresh = server.children("engine.grammar.worker")
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert all(map(gone, fresh))


def test_a_killed_server_leaves_no_process_of_any_kind(model: Path, started: list[Server]) -> None:
    started.append(server := Server(model))
    server.wait_ready()
    children = server.children()
    assert len(children) >= 2
    server.process.kill()
    assert all(map(gone, children))


def test_a_missing_model_folder_ends_the_server_at_once_with_its_name(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    shutil.copytree(model, folder)
    shutil.rmtree(folder)
    found = subprocess.run(
        [sys.executable, TRIVIAL, "serve", "0", folder, "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=WITHIN_S,
        check=False,
    )
    assert found.returncode == 1
    assert str(folder) in found.stderr
    assert "Traceback" not in found.stderr


def test_phases_of_an_end_are_timed_and_the_report_has_the_recorders(
    model: Path, started: list[Server]
) -> None:
    started.append(server := Server(model))
    rank = server.wait_ready()
    stream = stream_of(server)
    os.kill(rank, signal.SIGKILL)
    stream.error()
    code, printed = server.end()
    assert code == 1
    assert "shutdown took: drain" in printed
    assert printed.count("first cause: rank0 was killed by SIGKILL") == 1
    assert "flight recorder of ingress" in printed


def test_probes_answer_at_once_while_every_slot_decodes_and_the_queue_is_full(
    model: Path, started: list[Server]
) -> None:
    started.append(server := Server(model))
    server.wait_ready()
    streams = [Stream(server, 0) for _ in range(SLOTS)]
    assert all(stream.begun.wait(WITHIN_S) for stream in streams)
    streams += [Stream(server, 0) for _ in range(QUEUED)]
    waiting = re.compile(rf"num_queue_reqs{{.*}} {QUEUED}\.0")
    assert wait_for(
        lambda: waiting.search(httpx.get(server.url + "/metrics", timeout=WITHIN_S).text) is not None
    )
    with httpx.Client(base_url=server.url, timeout=WITHIN_S) as client:
        for _ in range(100):
            # A host that stands still for five seconds makes a sign of life too old until the next one.
            assert wait_for(lambda: client.get("/health_scheduler").status_code == 200)
        (rank,) = client.get("/health_scheduler").json()["ranks"]
        assert (rank["status"], rank["step_budget_s"]) == ("ok", 60.0)
        assert client.get("/health_generate").status_code == 200
    # How long that takes is for the bench; nobody has made room for it, for no stream has ended.
    assert server.post(PROMPT).status_code == 429
    assert all(stream.is_alive() for stream in streams)
    server.signal(signal.SIGTERM, 2)
    assert {stream.error() for stream in streams} == {"the server is stopping"}
    assert server.end()[0] == 0
