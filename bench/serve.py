"""`python -m engine bench serve`: a real server under load, on the machine that it shares with the clients.

Starts `python -m engine serve`, then for 1, 8 and 32 streams measures output tokens a second, time to first
token and time between tokens. Prompts of 96 tokens, 64 new ones, greedy. `decode_1`, `decode_8` and `prefill`
are the cases of `bench offline`; here HTTP is part of them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from bench.load import Told, stream
from engine.errors import EngineError

HOST = "127.0.0.1"
PROMPT, NEW_TOKENS, PREFILL = 96, 64, 512
STREAMS = {1: 8, 8: 4, 32: 2}
"""Streams -> requests that each makes, one after the other."""

READY_WITHIN_S = 600.0
STOP_WITHIN_S = 60.0


class ServerFailed(EngineError):
    """The server didn't come up, or didn't answer as it should."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures by case; `exit_code` is the server's, `kernels_compiled` how many it compiled meanwhile.

    raises  ServerFailed where a request wasn't answered whole: figures of the others would flatter
    """
    figures: dict[str, Any] = {}
    with server(["--model-path", args.model_path, *shlex.split(args.server_flags)]) as (port, child):
        before = compiled_kernels()
        figures |= anyio.run(_measure, port, args.quick, backend_options={"use_uvloop": True})
        figures["kernels_compiled"] = compiled_kernels() - before
        child.send_signal(signal.SIGTERM)
        figures["exit_code"] = child.wait(STOP_WITHIN_S)
    return figures


def compiled_kernels() -> int:
    """Kernels in Triton's cache: what is compiled while requests are served holds somebody's step up."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return len(list(folder.iterdir())) if folder.exists() else 0


@contextmanager
def server(flags: Sequence[str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """(port, process) of a server that is ready; killed at the end if it still runs. raises ServerFailed"""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "engine", "serve", "--host", HOST, "--port", str(port), *flags]
    child = subprocess.Popen(command, env=dict(os.environ))
    try:
        wait_until_ready(port, child)
        yield port, child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def wait_until_ready(port: int, child: subprocess.Popen[bytes]) -> None:
    """Returns once /ready says so. raises ServerFailed"""
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise ServerFailed(f"the server ended with {child.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ServerFailed(f"the server was not ready within {READY_WITHIN_S} s")


async def _measure(port: int, quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    errors: list[str] = []
    for streams, requests in STREAMS.items():
        await load(port, streams, 1, PROMPT, 8)
        told, wall_s = await load(port, streams, 1 if quick else requests, PROMPT, NEW_TOKENS)
        errors += [one.error for one in told if one.error]
        figures[f"streams_{streams}"] = case(told, wall_s, streams)
    for streams in (1, 8):
        rates = []
        for _ in range(1 if quick else 3):
            told, wall_s = await load(port, streams, 1, PREFILL, 1)
            errors += [one.error for one in told if one.error]
            rates.append(streams * PREFILL / wall_s)
        figures[f"prefill_{streams}_tokens_per_s"] = round(max(rates), 1)
    for streams in (1, 8):
        figures[f"decode_{streams}_tokens_per_s"] = figures[f"streams_{streams}"]["decode_tokens_per_s"]
    if errors:
        raise ServerFailed(f"{len(errors)} requests were not answered whole; the first: {errors[0]}")
    return {**figures, "errors": 0}


async def load(
    port: int, streams: int, requests: int, prompt: int, new_tokens: int
) -> tuple[list[Told], float]:
    """(what every request was answered, seconds in all) of so many clients at once."""
    told: list[Told] = []

    async def client(number: int) -> None:
        prompts = [tokens_of(number * requests + place, prompt) for place in range(requests)]
        told.extend(await stream(HOST, port, prompts, new_tokens))

    began_s = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(streams):
            tasks.start_soon(client, number)
    return told, time.perf_counter() - began_s


def tokens_of(number: int, length: int) -> list[int]:
    """A prompt of ordinary tokens that no other request of the case begins with."""
    return [300 + (number * 7919 + place * 104_729) % 7_000 for place in range(length)]


def case(told: Sequence[Told], wall_s: float, streams: int) -> dict[str, Any]:
    """Figures of one number of streams; rates in tokens a second, times in milliseconds.

    decode_tokens_per_s leaves the time to first token out: streams times the median rate of one.
    """
    whole = [one for one in told if not one.error]
    if not whole:
        return {"requests": len(told), "errors": len(told)}
    first_ms = [one.first_s * 1e3 for one in whole]
    gaps_ms = [gap * 1e3 for one in whole for gap in one.gaps_s()]
    rates = [len(one.gaps_s()) / sum(one.gaps_s()) for one in whole]
    return {
        "requests": len(told),
        "errors": len(told) - len(whole),
        "output_tokens_per_s": round(sum(one.tokens for one in whole) / wall_s, 1),
        "decode_tokens_per_s": round(streams * statistics.median(rates), 1),
        "ttft_ms_p50": round(percentile(first_ms, 50), 2),
        "ttft_ms_p99": round(percentile(first_ms, 99), 2),
        "itl_ms_p50": round(percentile(gaps_ms, 50), 2),
        "itl_ms_p99": round(percentile(gaps_ms, 99), 2),
    }


def percentile(values: Sequence[float], share: int) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * share // 100) - 1)]
