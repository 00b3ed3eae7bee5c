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
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httptools
import orjson

from bench.serve import HOST, STOP_WITHIN_S, ServerFailed, percentile, server

CASES, CLIENTS, BATCH = 64, 32, 4
ANSWER_WITHIN_S = 120.0
SPELL = 200
"""Requests of a client group between two spells in which one rank gets all traffic."""

NOT_ALONE = (
    "--dp", "--ep", "--dp-exchange", "--load-balance-method", "--dp-lm-head", "--speculative",
    "--speculative-algorithm",
)  # fmt: skip
"""Flags of several ranks, and of drafts: what the first server does without."""

KINDS = {
    "header": 20, "body": 10, "unrouted": 30, "uniform_batch": 8, "mixed_batch": 8, "open_batch": 8,
    "completions": 6, "cancelled": 10,
}  # fmt: skip
"""Forms of a request and how often each comes."""

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


def sampling(new_tokens: int, count: int = 1) -> dict[str, Any]:
    """Greedy, of a given length."""
    return {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "n": count}


def body_of(cases: list[tuple[list[int], int]], single: bool = True) -> list[dict[str, Any]]:
    """Bodies of /generate: one a case, or one with them all."""
    if single:
        return [{"input_ids": prompt, "sampling_params": sampling(new)} for prompt, new in cases]
    prompts, params = [prompt for prompt, _ in cases], [sampling(new) for _, new in cases]
    return [{"input_ids": prompts, "sampling_params": params}]


class Traffic:
    """Requests of all kinds from many clients at once.

    faults  what must not be: a wrong answer, an error, an answer that doesn't come
    """

    def __init__(
        self,
        port: int,
        ranks: int,
        cases: list[tuple[list[int], int]],
        expected: list[list[int]],
        wanted: int,
    ) -> None:
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self.by_rank: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.tokens = 0
        self._port, self._ranks, self._cases, self._expected = port, ranks, cases, expected
        self._left = wanted
        self._draw = random.Random(11)

    def figures(self) -> dict[str, Any]:
        """What was done."""
        milliseconds = [seconds * 1e3 for seconds in self.seconds]
        return {
            "requests": sum(self.done.values()),
            "by_kind": dict(sorted(self.done.items())),
            "by_rank": {str(rank): count for rank, count in sorted(self.by_rank.items())},
            "output_tokens": self.tokens,
            "wrong": len(self.faults),
            "latency_ms_p50": round(percentile(milliseconds, 50), 1),
            "latency_ms_p99": round(percentile(milliseconds, 99), 1),
        }

    async def run(self) -> None:
        """Until as many requests as wanted are answered."""
        async with anyio.create_task_group() as tasks:
            for _ in range(CLIENTS):
                tasks.start_soon(self._client)

    async def _client(self) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        while self._left > 0 and not self.faults:
            # A spell: everything goes to one rank, and the others are idle but take part.
            spell = self._left // SPELL % 4 == 0
            kind = "header" if spell else self._draw.choices(kinds, weights)[0]
            rank = self._left // SPELL // 4 % self._ranks if spell else self._draw.randrange(self._ranks)
            count = BATCH if kind.endswith("batch") else 1
            places = [self._draw.randrange(len(self._cases)) for _ in range(count)]
            self._left -= count
            began_s = time.perf_counter()
            try:
                with anyio.fail_after(ANSWER_WITHIN_S):
                    await self._one(kind, rank, places)
            except (TimeoutError, OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
                self.faults.append(f"{kind} of cases {places}: {error!r}")
            self.seconds.append(time.perf_counter() - began_s)
            if self._draw.random() < 0.01:
                await anyio.sleep(0.05)

    async def _one(self, kind: str, rank: int, places: list[int]) -> None:
        cases = [self._cases[place] for place in places]
        (body,) = body_of(cases, single=len(cases) == 1)
        headers: dict[str, str] = {}
        demanded = [-1] * len(cases)
        if kind in ("header", "uniform_batch"):
            headers, demanded = {"x-data-parallel-rank": str(rank)}, [rank] * len(cases)
        elif kind == "body":
            body["routed_dp_rank"], demanded = rank, [rank]
        elif kind == "mixed_batch":
            demanded = [self._draw.randrange(-1, self._ranks) for _ in cases]
            body["routed_dp_rank"] = [None if one == -1 else one for one in demanded]
        elif kind == "completions":
            body["sampling_params"]["n"] = 2
        if kind == "cancelled":
            body["sampling_params"]["max_new_tokens"] = 400
            await give_up(self._port, body)
            self.done[kind] += 1
            return
        status, reply = await post(self._port, body, headers)
        self._check(kind, places, demanded, status, reply)

    def _check(self, kind: str, places: list[int], demanded: list[int], status: int, reply: Any) -> None:
        if status != 200:
            self.faults.append(f"{kind} of cases {places}: status {status}: {reply}")
            return
        replies = reply if isinstance(reply, list) else [reply]
        self.done[kind] += len(places)
        for number, one in enumerate(replies):
            place = places[0] if kind == "completions" else places[number]
            wanted = -1 if kind == "completions" else demanded[number]
            where = one["meta_info"]["dp_rank"]
            self.by_rank[where] += 1
            self.tokens += len(one["output_ids"])
            if one["output_ids"] != self._expected[place]:
                self.faults.append(f"{kind}, case {place}: {one['output_ids']}, not {self._expected[place]}")
            if wanted not in (-1, where):
                self.faults.append(f"{kind}, case {place}: rank {where}, not {wanted}")
        if kind == "completions" and len({one["meta_info"]["dp_rank"] for one in replies}) != 1:
            self.faults.append(f"completions of case {places[0]} are on several ranks")


class Answer:
    """One HTTP answer."""

    def __init__(self) -> None:
        self.body, self.complete = b"", False
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self.body += data

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.complete = True


def request_of(body: dict[str, Any], headers: dict[str, str]) -> bytes:
    """The bytes of a request."""
    raw = orjson.dumps(body)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = [
        "POST /generate HTTP/1.1", f"host: {HOST}", "content-type: application/json",
        f"content-length: {len(raw)}", *lines,
    ]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


async def post(port: int, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
    """(status, body) of a request on a connection of its own."""
    answer = Answer()
    async with await anyio.connect_tcp(HOST, port) as connection:
        await connection.send(request_of(body, headers))
        while not answer.complete:
            answer.parser.feed_data(await connection.receive())
    return answer.parser.get_status_code(), orjson.loads(answer.body)


async def give_up(port: int, body: dict[str, Any]) -> None:
    """Streams, and leaves at the first event."""
    async with await anyio.connect_tcp(HOST, port) as connection:
        await connection.send(request_of({**body, "stream": True}, {}))
        received = b""
        while b"data: " not in received:
            received += await connection.receive()
