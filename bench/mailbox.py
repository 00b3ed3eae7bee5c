"""What the runtime costs: telling and taking, asking, a link's round trip, a device thread's round trip.

Nanosecond figures are the best of seven; round trips are medians, the device thread's also a 99th percentile.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import SocketStream

from engine.actors.ask import Asks
from engine.actors.device import DeviceThread
from engine.actors.links import Link
from engine.actors.mailbox import Mailbox
from engine.actors.wire import Codec
from engine.messages import Abort, Ended, Enqueue, RunStep, StepDone, StepOut

BEST_OF = 7
MESSAGES = 20_000
ROUND_TRIPS = 1_000
FRAME_TOKENS = 500

LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "asyncio": ("asyncio", {}),
    "trio": ("trio", {}),
}


def run(args: argparse.Namespace) -> dict[str, float]:
    """Figures by name; each ends in the loop that it was measured on."""
    figures: dict[str, float] = {}
    for loop, (backend, options) in LOOPS.items():
        for name, measure in MEASURES.items():
            values = anyio.run(measure, backend=backend, backend_options=options)
            for suffix, value in values.items():
                figures[f"{name}{suffix}_{loop}"] = round(value, 3)
    return figures


async def tell_take() -> dict[str, float]:
    """One message through a mailbox, drained in batches of 64 by another task; nanoseconds."""

    async def once() -> float:
        box = Mailbox("bench", 64, "wait")
        msg = Abort(1)

        async def sender() -> None:
            for _ in range(MESSAGES // 64):
                for _ in range(64):
                    box.tell(msg)
                await anyio.lowlevel.checkpoint()
                while len(box):
                    await anyio.lowlevel.checkpoint()

        begin = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender)
            left = MESSAGES // 64 * 64
            while left:
                left -= len(await box.take())
        return (time.perf_counter() - begin) / MESSAGES * 1e9

    return {"_ns": min([await once() for _ in range(BEST_OF)])}


async def ask() -> dict[str, float]:
    """A question and its reply, both in one loop; microseconds."""
    box, asks = Mailbox("bench", 64, "reject"), Asks()

    async def answering() -> None:
        while True:
            for msg in await box.take():
                asks.reply(msg.slot, 1)

    question = Enqueue(())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answering)
        taken = await _timed(lambda: asks.ask(box, question, within_s=5.0))
        tasks.cancel_scope.cancel()
    return {"_us": statistics.median(taken)}


async def link() -> dict[str, float]:
    """A step of 2 kB one way and a small message back, over a Unix socket pair in one loop; microseconds."""
    near, far = socket.socketpair()
    receivers, there, back = ("rank", "detok"), {"detok": (StepOut,)}, {"rank": (Ended,)}
    ends = []
    for sock, accepts in ((near, back), (far, there)):
        stream = await SocketStream.from_socket(sock)
        ends.append(Link("bench", "specs", stream, Codec(receivers, accepts), Mailbox("out", 64, "wait")))
    rank, detok = Mailbox("rank", 64, "wait"), Mailbox("detok", 64, "wait")
    step = StepOut(1, 0, b"\0" * 8, b"\1", b"\0" * 4 * FRAME_TOKENS, b"\0")

    async def answering() -> None:
        answer = ends[1].ref("rank")
        while True:
            for _ in await detok.take():
                await answer.offer(Ended(1, 1))

    async def round_trip() -> None:
        await ends[0].ref("detok").offer(step)
        await rank.take()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends[0].greet, 5.0)
        await ends[1].greet(5.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends[0].run, {"rank": rank}, print)
        tasks.start_soon(ends[1].run, {"detok": detok}, print)
        tasks.start_soon(answering)
        taken = await _timed(round_trip)
        tasks.cancel_scope.cancel()
    for end in ends:
        await end.close()
    return {"_us": statistics.median(taken)}


class _Answers:
    def execute(self, job: RunStep) -> StepDone:
        return StepDone(job.epoch, b"", b"")


async def device() -> dict[str, float]:
    """A job to the device thread and its answer in the mailbox; microseconds."""
    box = Mailbox("rank", 64, "wait")
    thread = DeviceThread(_Answers, box.tell_first)
    job = RunStep(1, "idle", b"", b"", b"", b"", b"", b"")

    async def round_trip() -> None:
        thread.submit(job)
        await box.take()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.run, 5.0)
        await anyio.sleep(0.05)
        taken = sorted(await _timed(round_trip))
        tasks.cancel_scope.cancel()
    return {"_p50_us": statistics.median(taken), "_p99_us": taken[len(taken) * 99 // 100]}


async def _timed(act: Callable[[], Awaitable[Any]]) -> list[float]:
    taken = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        await act()
        taken.append((time.perf_counter() - begin) * 1e6)
    return taken[ROUND_TRIPS // 10 :]


MEASURES = {"tell_take": tell_take, "ask": ask, "link": link, "device": device}
