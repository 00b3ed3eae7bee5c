"""`python -m engine bench traffic`: ranks that act as one engine against one rank alone, answer for answer.

A server with one rank and without drafts answers a set of greedy requests; then a server with several ranks
gets thousands of them at once in every form: routed by header or body, as batches for one rank or several,
unrouted, with several completions, given up in the middle, and in spells in which all ranks but one are idle.
Every answer must be the same. At the end nothing may be left: no request, no page, no process, no shared
memory, and exit code 0.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import anyio

from bench.serve import HOST, STOP_WITHIN_S, ServerFailed, server
from bench.traffic_clients import Traffic
from bench.traffic_requests import body_of, post

CASES = 64
NOT_ALONE = (
    "--dp", "--ep", "--dp-exchange", "--load-balance-method", "--dp-lm-head", "--speculative",
    "--speculative-algorithm",
)  # fmt: skip
"""Flags of several ranks, and of drafts: what the first server does without."""

SETTLE_S = 5.0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures; raises ServerFailed where an answer differs, doesn't come, or anything is left."""
    flags = ["--model-path", args.model_path, *shlex.split(args.server_flags)]
    ranks = int(flags[flags.index("--dp") + 1]) if "--dp" in flags else 2
    wanted = 200 if args.quick else args.requests
    cases = make_cases()
    alone = drop(flags, NOT_ALONE)
    with server(alone) as (port, child):
        expected = anyio.run(answers, port, cases, backend_options={"use_uvloop": True})
        stop(child)
    shared = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    flags = flags if "--dp" in flags else [*flags, "--dp", str(ranks)]
    with server(flags) as (port, child):
        pids = children_of(child.pid)
        traffic = Traffic(port, ranks, cases, expected, wanted)
        began_s = time.perf_counter()
        anyio.run(traffic.run, backend_options={"use_uvloop": True})
        wall_s = time.perf_counter() - began_s
        left = wait_settled(port, ranks)
        exit_code = stop(child)
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    leaked = sorted(set(os.listdir("/dev/shm")) - shared) if shared or Path("/dev/shm").is_dir() else []
    figures = traffic.figures() | {
        "ranks": ranks, "wall_s": round(wall_s, 1), "exit_code": exit_code, "left": left,
        "processes_left": len(alive), "shared_memory_left": leaked,
    }  # fmt: skip
    if traffic.faults or left or alive or leaked or exit_code:
        raise ServerFailed(f"{len(traffic.faults)} faults, the first: {traffic.faults[:1]}; {figures}")
    return figures


def make_cases() -> list[tuple[list[int], int]]:
    """(prompt, new tokens): mostly short, some over a page."""
    draw = random.Random(5)
    cases = []
    for number in range(CASES):
        length = draw.choice((1, 3, 9, 20, 40)) if number % 32 else 300
        cases.append(([300 + draw.randrange(7000) for _ in range(length)], draw.randint(1, 8)))
    return cases


def drop(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """The flags without these and their values."""
    kept, skip = [], False
    for place, flag in enumerate(flags):
        if flag in names:
            skip = place + 1 < len(flags) and not flags[place + 1].startswith("--")
        elif skip:
            skip = False
        else:
            kept.append(flag)
    return kept


def stop(child: Any) -> int:
    """Exit code after a signal."""
    child.send_signal(signal.SIGTERM)
    code: int = child.wait(STOP_WITHIN_S)
    return code


def children_of(pid: int) -> list[int]:
    """Processes that this one has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_settled(port: int, ranks: int) -> list[str]:
    """What the ranks still hold after a moment of rest; empty as it should be."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        left = []
        for rank in range(ranks):
            one = {
                name: float(value)
                for name, value in re.findall(
                    rf'^sglang:(\w+){{[^}}]*dp_rank="{rank}"[^}}]*}} (\S+)$', text, re.M
                )
            }
            held = one["max_total_num_tokens"] - one["kv_available_tokens"]
            left += [
                f"rank {rank}: {name} is {value}"
                for name, value in (
                    ("num_running_reqs", one["num_running_reqs"]),
                    ("num_queue_reqs", one["num_queue_reqs"]),
                    ("tokens' worth of pages in use", held),
                )
                if value
            ]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


async def answers(port: int, cases: list[tuple[list[int], int]]) -> list[list[int]]:
    """The tokens of each case."""
    found: list[list[int]] = [[]] * len(cases)
    gate = anyio.CapacityLimiter(8)

    async def one(place: int) -> None:
        async with gate:
            status, reply = await post(port, body_of([cases[place]])[0], {})
        if status != 200:
            raise ServerFailed(f"case {place}: status {status}: {reply}")
        found[place] = reply["output_ids"]

    async with anyio.create_task_group() as tasks:
        for place in range(len(cases)):
            tasks.start_soon(one, place)
    return found
