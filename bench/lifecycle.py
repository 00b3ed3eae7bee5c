"""How fast ends and probes are: a real server of two processes, with the runner of one token.

A rank's death to its client's error event, SIGTERM to the exit of an idle server, and answers of
/health_scheduler while every slot is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from engine.config import NANO
from tests.actors.test_processes import LONG, Server
from tests.actors.test_rank_processes import Stream

STREAMS = 16
GEOMETRY = Path(__file__).parents[1] / "tests" / "actors" / "geometry.json"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """As bench.run."""
    times, probes = (1, 200) if args.quick else (5, 2000)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "nano"
        shutil.copytree(NANO, model, ignore=shutil.ignore_patterns("*.safetensors"))
        shutil.copy(GEOMETRY, model / "config.json")
        deaths = [_death(model) for _ in range(times)]
        exits = [_exit(model) for _ in range(times)]
        answers = sorted(_answers(model, probes))
    return {
        "rank_death_to_error_s": {"median": statistics.median(deaths), "worst": max(deaths), "runs": times},
        "sigterm_to_exit_idle_s": {"median": statistics.median(exits), "worst": max(exits), "runs": times},
        "health_scheduler_under_load_ms": {
            "p50": answers[len(answers) // 2] * 1000,
            "p99": answers[int(len(answers) * 0.99)] * 1000,
            "answers": len(answers),
            "streams": STREAMS,
        },
    }


def _death(model: Path) -> float:
    server = Server(model)
    rank = server.wait_ready()
    stream = Stream(server, 0)
    stream.begun.wait(20)
    killed_s = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    stream.error()
    server.end(30)
    return stream.over_s - killed_s


def _exit(model: Path) -> float:
    server = Server(model)
    server.wait_ready()
    told_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code, printed = server.end(30)
    if code:
        raise RuntimeError(f"exit code {code}: {printed}")
    return time.monotonic() - told_s


def _answers(model: Path, probes: int) -> list[float]:
    server = Server(model)
    server.wait_ready()
    over = threading.Event()
    clients = [threading.Thread(target=_client, args=(server.url, over), daemon=True) for _ in range(STREAMS)]
    for client in clients:
        client.start()
    time.sleep(1.0)
    found = []
    with httpx.Client() as http:
        for _ in range(probes):
            began_s = time.perf_counter()
            answer = http.get(server.url + "/health_scheduler")
            found.append(time.perf_counter() - began_s)
            if answer.status_code != 200:
                raise RuntimeError(json.dumps(answer.json()))
            time.sleep(0.005)
    over.set()
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    server.end(30)
    for client in clients:
        client.join()
    return found


def _client(url: str, over: threading.Event) -> None:
    """Streams without an end, without reading their text: this process's own time isn't the subject."""
    try:
        while not over.is_set():
            with httpx.stream("POST", url + "/v1/completions", json=LONG, timeout=60) as answer:
                for _ in answer.iter_raw():
                    if over.is_set():
                        return
    except httpx.HTTPError:
        return
