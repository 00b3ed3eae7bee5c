"""Clients of `bench traffic`: requests of all kinds at once, each answer compared with what one rank gave."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import anyio

from bench.serve import percentile
from bench.traffic_requests import body_of, give_up, post

CLIENTS, BATCH = 32, 4
ANSWER_WITHIN_S = 120.0
SPELL = 200
"""Requests of a client group between two spells in which one rank gets all traffic."""

KINDS = {
    "header": 20, "body": 10, "unrouted": 30, "uniform_batch": 8, "mixed_batch": 8, "open_batch": 8,
    "completions": 6, "cancelled": 10,
}  # fmt: skip
"""Forms of a request and how often each comes."""


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
