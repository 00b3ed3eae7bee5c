"""`python -m engine bench exchange`: two ranks tell each other their wants, against an all-gather of gloo.

Two processes on two cores of one package. A native round is what the engine does: `PeerLines.offer` until the
answer is delivered (p50_us, p99_us), on the event loop and with the waiter thread in its place. `channel_*`
is the same without the lines. `post_arrival_*` begins when the later of both ranks has
published. `rest_p50_us`: the peer slept and a wake-up was needed. A round of gloo gathers 8 int64. `ratio` is
gloo's median over the native one, of interleaved pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio

from engine.actors.timers import Timers
from engine.exchange import STEP, Heard
from engine.exchange.lines import INLINE_NS, LISTEN_AFTER_S, PeerLines
from engine.exchange.native import NativeExchange, new_session, remove

PAIRS = 9
ROUNDS, GLOO_ROUNDS, REST_ROUNDS, WARM_UP = 20_000, 300, 20, 2_000
QUICK = 10
BEYOND_LIMIT = 0.25
"""Share of rounds that may need the waiter thread; more, and the median wouldn't speak of the inline path."""

WANTS = (123, 5, 1, 0, 1, 2, 1)
TIMEOUT_S = 30.0


def run(args: argparse.Namespace) -> dict[str, float]:
    """Figures in microseconds of both ranks' rounds together, and ratios. raises RuntimeError."""
    session, cores = new_session(), two_cores()
    rounds = ROUNDS // QUICK if args.quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, session, folder, str(rounds)]
        ranks = [subprocess.Popen([*command, str(rank), str(core)]) for rank, core in enumerate(cores)]
        codes = [rank.wait() for rank in ranks]
        remove(session)
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return figures([json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)])


def figures(told: list[dict[str, Any]]) -> dict[str, float]:
    """From what the ranks measured, in ns by pair of native and gloo rounds."""
    beyond = sum(rank["beyond"] for rank in told) / sum(len(pair) for rank in told for pair in rank["offer"])
    if beyond > BEYOND_LIMIT:
        raise RuntimeError(f"{beyond:.1%} of the rounds were not answered in line")
    out: dict[str, float] = {"beyond_inline": beyond}
    for name, prefix in (
        ("offer", ""),
        ("channel", "channel_"),
        ("post", "post_arrival_"),
        ("gloo", "gloo_"),
    ):
        taken = sorted(ns for rank in told for pair in rank[name] for ns in pair)
        out[f"{prefix}p50_us"] = taken[len(taken) // 2] / 1e3
        out[f"{prefix}p99_us"] = taken[len(taken) * 99 // 100] / 1e3
    out["rest_p50_us"] = statistics.median(ns for rank in told for ns in rank["rest"]) / 1e3
    ratios = [
        statistics.median(gloo) / statistics.median(offer)
        for rank in told
        for gloo, offer in zip(rank["gloo"], rank["offer"], strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    out |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
    return {name: round(value, 4) for name, value in out.items()}


def two_cores() -> tuple[int, int]:
    """Two processors that aren't threads of one core, of one package where there is such a pair."""
    places: dict[tuple[str, str], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            core = (topology / "core_id").read_text().strip()
        except OSError:
            package, core = "0", str(cpu)
        places.setdefault((package, core), cpu)
    for (package, _), first in places.items():
        for (other, _), second in places.items():
            if package == other and second > first:
                return first, second
    raise RuntimeError("two ranks need two cores")


class Rank:
    """One rank's measurements, in ns. Epochs go on from one measurement to the next."""

    def __init__(self, exchange: NativeExchange, timers: Timers) -> None:
        self.rank = exchange.rank
        self.channel = exchange.channel(STEP)
        self.lines = PeerLines(exchange, {STEP: self._deliver}, timers)
        self.epoch = 0
        self.beyond = 0
        self._heard = -1
        self._arrived = anyio.Event()
        self._delivered_ns = 0

    def _deliver(self, heard: Heard) -> None:
        self._delivered_ns = time.perf_counter_ns()
        self._heard = heard[0]
        self._arrived.set()

    async def _until(self, epoch: int) -> None:
        while self._heard < epoch:
            self._arrived = anyio.Event()
            await self._arrived.wait()

    async def offers(self, count: int) -> list[int]:
        """From the call of `offer` to the delivery; without rounds that the peer had begun and told."""
        book, kept = blank_book(count), 0
        for epoch in range(self.epoch, self.epoch + count):
            early = self._heard == epoch
            begin = time.perf_counter_ns()
            self.lines.offer(STEP, epoch, WANTS)
            if early or self._heard < epoch:
                self.beyond += 1
                await self._until(epoch)
            if not early:
                book[kept] = self._delivered_ns - begin
                kept += 1
        self.epoch += count
        return book[:kept].tolist()

    async def rests(self, count: int) -> list[int]:
        """As `offers`, of rank 0, whose peer is at rest and answers when it is told."""
        taken = []
        for epoch in range(self.epoch, self.epoch + count):
            if self.rank == 0:
                await anyio.sleep(8 * LISTEN_AFTER_S)
                begin = time.perf_counter_ns()
                self.lines.offer(STEP, epoch, WANTS)
            await self._until(epoch)
            if self.rank == 0:
                taken.append(self._delivered_ns - begin)
            else:
                self.lines.offer(STEP, epoch, WANTS)
        self.epoch += count
        return taken

    def exchanges(self, count: int) -> tuple[list[int], list[int]]:
        """From the call of `exchange` to its end, and that from the later rank's publication."""
        exchange, poll, timings, clock_ns = (
            self.channel.exchange,
            self.channel.poll,
            self.channel.timings,
            time.perf_counter_ns,
        )
        taken, post = blank_book(count), blank_book(count)
        for at in range(count):
            begin = clock_ns()
            heard = exchange(self.epoch + at, WANTS, INLINE_NS)
            while heard is None:
                heard = poll(INLINE_NS)
            taken[at] = clock_ns() - begin
            post[at] = timings()[3]
        self.epoch += count
        return taken.tolist(), post.tolist()


def blank_book(count: int) -> array[int]:
    """Room for so many measurements, touched: a page fault while measuring would keep both ranks waiting."""
    return array("q", [0]) * count


async def measure(
    exchange: NativeExchange, gloo: Callable[[], object], core: int, rounds: int
) -> dict[str, Any]:
    """Everything that one rank measures, in the order that the other one keeps, too."""
    told: dict[str, Any] = {"offer": [], "channel": [], "post": [], "gloo": [], "rest": []}
    timers = Timers()
    one = Rank(exchange, timers)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        tasks.start_soon(one.lines.run)
        await anyio.sleep(0.05)
        # The waiter and gloo's threads have begun by now, and run where there is room.
        os.sched_setaffinity(0, {core})
        one.exchanges(WARM_UP)
        one.beyond = 0
        for _ in range(PAIRS):
            told["offer"].append(await one.offers(-(-rounds // PAIRS)))
            told["gloo"].append(timed(gloo, GLOO_ROUNDS))
            taken, post = one.exchanges(-(-rounds // PAIRS))
            told["channel"].append(taken)
            told["post"].append(post)
        told["beyond"] = one.beyond
        told["rest"] = await one.rests(REST_ROUNDS)
        tasks.cancel_scope.cancel()
    return told


def timed(act: Callable[[], object], count: int) -> list[int]:
    """Nanoseconds of each call."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        act()
        taken.append(time.perf_counter_ns() - begin)
    return taken


def main(session: str, folder: str, rounds: str, rank: str, core: str) -> None:
    """One rank: writes its measurements into a file that has its number for a name."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", 2),
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    own = torch.tensor([0, *WANTS])
    every = [torch.empty_like(own) for _ in range(2)]
    exchange = NativeExchange(session, int(rank), TIMEOUT_S)

    def gloo() -> None:
        dist.all_gather(every, own)

    told = anyio.run(measure, exchange, gloo, int(core), int(rounds), backend_options={"use_uvloop": True})
    Path(folder, rank).write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
