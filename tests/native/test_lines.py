"""A rank's loop hears its peer in line or by the waiter thread, asked or not; its errors end `run`."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from engine.actors.timers import Timers
from engine.errors import ExchangeClosed, ExchangeError, ExchangeTimeout, SequenceDiverged
from engine.exchange import STEP, TIER, Heard
from engine.exchange.lines import LISTEN_AFTER_S, PeerLines
from engine.exchange.native import NativeExchange, new_session

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the native exchange is Linux's"),
    pytest.mark.anyio,
]
WANTS = (4, 4, 1, 0, 1, 2, 1)
REST_S = 4 * LISTEN_AFTER_S


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return (request.param, {"use_uvloop": True} if request.param == "asyncio" else {})


def pair(timeout_s: float) -> list[NativeExchange]:
    """Both ends, in this process: each has a loop's end and a thread."""
    session, ends = new_session(), {}
    other = threading.Thread(target=lambda: ends.update({1: NativeExchange(session, 1, timeout_s)}))
    other.start()
    ends[0] = NativeExchange(session, 0, timeout_s)
    other.join()
    return [ends[0], ends[1]]


class Side:
    """One rank's lines and what they delivered."""

    def __init__(self, exchange: NativeExchange, timers: Timers) -> None:
        self.heard: list[Heard] = []
        self.told: list[Heard] = []
        self.lines = PeerLines(exchange, {STEP: self.heard.append, TIER: self.told.append}, timers)
        self.error: ExchangeError | None = None
        self.ended = anyio.Event()

    async def run(self) -> None:
        try:
            await self.lines.run()
        except ExchangeError as error:
            self.error = error
        self.ended.set()

    async def until(self, count: int) -> list[Heard]:
        with anyio.fail_after(60):
            while len(self.heard) < count:
                await anyio.sleep(0.0002)
        return self.heard


@asynccontextmanager
async def sides(timeout_s: float = 60.0) -> AsyncIterator[tuple[Side, Side]]:
    timers = Timers()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        one, two = (Side(exchange, timers) for exchange in pair(timeout_s))
        tasks.start_soon(one.run)
        tasks.start_soon(two.run)
        await anyio.sleep(REST_S)
        yield one, two
        tasks.cancel_scope.cancel()


async def test_a_rank_at_rest_hears_what_its_peer_begins_and_answers() -> None:
    async with sides() as (one, two):
        for epoch in range(20):
            await anyio.sleep(REST_S * (epoch % 3))
            first, second = (one, two) if epoch % 2 else (two, one)
            first.lines.offer(STEP, epoch, WANTS)
            assert (await second.until(epoch + 1))[-1] == (epoch, 1 if first is two else 0, WANTS)
            second.lines.offer(STEP, epoch, WANTS)
            await first.until(epoch + 1)


async def test_an_answer_that_is_here_already_is_delivered_before_offer_returns() -> None:
    async with sides() as (one, two):
        for epoch in range(50):
            one.lines.offer(STEP, epoch, WANTS)
            two.lines.offer(STEP, epoch, WANTS)
            assert two.heard[-1] == (epoch, 0, WANTS)
            await one.until(epoch + 1)


async def test_channels_dont_mix() -> None:
    async with sides() as (one, two):
        for epoch in range(10):
            one.lines.offer(TIER, epoch, (epoch,))
            one.lines.offer(STEP, epoch, WANTS)
            two.lines.offer(STEP, epoch, WANTS)
            two.lines.offer(TIER, epoch, (-epoch,))
            await one.until(epoch + 1)
            assert two.told[-1] == (epoch, 0, (epoch,))
            with anyio.fail_after(60):
                while len(one.told) <= epoch:
                    await anyio.sleep(0.0002)
            assert one.told[-1] == (epoch, 1, (-epoch,))


async def test_an_unanswered_offer_ends_both_ranks_with_one_error() -> None:
    async with sides(timeout_s=1.0) as (one, two):
        one.lines.offer(STEP, 0, WANTS)
        with anyio.fail_after(60):
            await one.ended.wait()
            await two.ended.wait()
        assert type(one.error) is type(two.error) is ExchangeTimeout
        assert two.heard == [(0, 0, WANTS)]


async def test_ranks_at_rest_have_no_deadline() -> None:
    async with sides(timeout_s=0.5) as (one, two):
        one.lines.offer(STEP, 0, WANTS)
        two.lines.offer(STEP, 0, WANTS)
        await anyio.sleep(1.0)
        assert not one.ended.is_set()
        assert not two.ended.is_set()


async def test_unequal_epochs_are_one_error_on_both_sides() -> None:
    async with sides() as (one, two):
        one.lines.offer(STEP, 0, WANTS)
        with pytest.raises(SequenceDiverged):
            two.lines.offer(STEP, 1, WANTS)
        with anyio.fail_after(60):
            await one.ended.wait()
        assert type(one.error) is SequenceDiverged


async def test_who_leaves_owing_nothing_ends_nobody_but_refuses_the_next_round() -> None:
    timers = Timers()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        exchanges = pair(60.0)
        one = Side(exchanges[0], timers)
        tasks.start_soon(one.run)
        await anyio.sleep(REST_S)
        peer = exchanges[1].channel(STEP)
        peer.publish(0, WANTS)
        exchanges[1].close()
        with anyio.fail_after(60):
            await one.ended.wait()
        assert one.error is None
        assert one.heard == [(0, 1, WANTS)]
        with pytest.raises(ExchangeClosed):
            one.lines.offer(STEP, 0, WANTS)
        tasks.cancel_scope.cancel()
