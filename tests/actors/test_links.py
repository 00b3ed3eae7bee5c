"""Links: frames, Hello, bad bytes, bounds, back-pressure; over memory, over sockets, on both loops."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketStream

from engine.actors import wire
from engine.actors.links import Link, memory_pair
from engine.actors.mailbox import Mailbox
from engine.actors.wire import Codec
from engine.errors import BadMessage, LinkRefused
from engine.messages import Abort, Hello, Message, Snapshot, StepOut, Stop
from tests.actors.loops import both_loops

pytestmark = pytest.mark.anyio

RECEIVERS = ("rank", "detok", "health")
TO_RANK: dict[str, tuple[type[Message], ...]] = {"rank": (Abort, Stop)}
TO_API: dict[str, tuple[type[Message], ...]] = {"detok": (StepOut,), "health": (Snapshot,)}


class End:
    """One end of a link, with a mailbox for each actor that it holds."""

    def __init__(
        self, name: str, stream: Any, accepts: dict[str, Any], specs: str = "s" * 64, size: int = 64
    ) -> None:
        self.stream = stream
        self.link = Link(name, specs, stream, Codec(RECEIVERS, accepts), Mailbox(f"{name}-out", 64, "wait"))
        self.boxes = {actor: Mailbox(actor, size, "wait") for actor in accepts}
        self.bad: list[BadMessage] = []

    async def run(self) -> None:
        await self.link.run(self.boxes, self.bad.append)


async def memory_streams() -> tuple[Any, Any]:
    return memory_pair()


async def socket_streams() -> tuple[Any, Any]:
    near, far = socket.socketpair()
    return await SocketStream.from_socket(near), await SocketStream.from_socket(far)


both_transports = pytest.mark.parametrize("streams", [memory_streams, socket_streams])


@asynccontextmanager
async def linked(streams: Callable[[], Any], api_size: int = 64) -> AsyncIterator[tuple[End, End]]:
    """An api end and a rank end, greeted and running; left by closing both."""
    near, far = await streams()
    api, rank = End("api", near, TO_API, size=api_size), End("rank0", far, TO_RANK)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(api.link.greet, 60.0)
        await rank.link.greet(60.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(api.run)
        tasks.start_soon(rank.run)
        yield api, rank
        await api.link.close()
        await rank.link.close()


def step(epoch: int, tokens: int = 1) -> StepOut:
    return StepOut(epoch, 0, b"\1" * 8, b"\1", b"\2" * 4 * tokens, b"\0")


@both_loops
@both_transports
async def test_messages_arrive_once_and_in_order_at_the_actor_they_name(streams: Any) -> None:
    async with linked(streams) as (api, rank):
        for epoch in range(20):
            await rank.link.ref("detok").offer(step(epoch))
        api.link.ref("rank").tell(Abort(9))
        got: list[StepOut] = []
        while len(got) < 20:
            got += await api.boxes["detok"].take()
        assert [out.epoch for out in got] == list(range(20))
        assert await rank.boxes["rank"].take() == [Abort(9)]


@both_transports
async def test_each_end_learns_the_others_name(streams: Any) -> None:
    async with linked(streams) as (api, rank):
        assert (api.link.peer, rank.link.peer) == ("rank0", "api")


@both_transports
async def test_ends_with_different_specs_refuse_each_other(streams: Any) -> None:
    near, far = await streams()
    api, rank = End("api", near, TO_API, specs="a" * 64), End("rank0", far, TO_RANK, specs="b" * 64)
    refused: list[str] = []

    async def greet(end: End) -> None:
        with pytest.raises(LinkRefused) as raised:
            await end.link.greet(1.0)
        refused.append(str(raised.value))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(greet, api)
        tasks.start_soon(greet, rank)
    assert any("api has version 1 and specs aaaaaaaaaaaa, but rank0" in text for text in refused)
    await near.aclose()
    await far.aclose()


async def test_a_silent_far_end_is_refused_after_the_deadline() -> None:
    near, _ = memory_pair()
    began = anyio.current_time()
    with pytest.raises(LinkRefused, match="no Hello within"):
        await End("api", near, TO_API).link.greet(2.0)
    assert anyio.current_time() == began + 2.0


async def test_a_first_frame_that_is_no_hello_is_refused() -> None:
    near, far = memory_pair()
    await far.send(Codec(RECEIVERS, {}).encode("detok", step(1)))
    with pytest.raises(LinkRefused, match="first frame is a StepOut"):
        await End("api", near, TO_API).link.greet(1.0)


def frame(index: int, body: bytes) -> bytes:
    return (len(body) + 1).to_bytes(4, "little") + bytes((index,)) + body


@pytest.mark.parametrize(
    "bad",
    [
        frame(1, b"\xc1 not msgpack"),
        frame(1, msgspec.msgpack.encode(["NoSuchMessage", 1])),
        frame(1, msgspec.msgpack.encode(["StepOut", "epoch", 0, b"", b"", b"", b""])),
        frame(1, msgspec.msgpack.encode(["Abort", 1])),
        frame(77, b""),
        frame(0, msgspec.msgpack.encode(["Abort", 1])),
    ],
)
async def test_a_frame_that_doesnt_decode_is_counted_kept_and_reaches_no_actor(bad: bytes) -> None:
    async with linked(memory_streams) as (api, rank):
        await rank.stream.send(bad)
        await rank.link.ref("detok").offer(step(3))
        assert await api.boxes["detok"].take() == [step(3)]
        assert (len(api.bad), api.link.codec.bad.count) == (1, 1)
        assert api.link.codec.bad.kept == bad[4:]


async def test_of_a_bad_frame_only_the_first_kilobyte_is_kept() -> None:
    async with linked(memory_streams) as (api, rank):
        await rank.stream.send(frame(1, b"\xc1" * 5000))
        await rank.link.ref("detok").offer(step(3))
        await api.boxes["detok"].take()
        assert len(api.link.codec.bad.kept) == wire.KEPT_BYTES


async def test_a_second_hello_is_a_bad_message() -> None:
    async with linked(memory_streams) as (api, rank):
        await rank.stream.send(rank.link.codec.encode("", Hello(1, "s", "x")))
        await rank.link.ref("detok").offer(step(3))
        await api.boxes["detok"].take()
        assert len(api.bad) == 1


@pytest.mark.parametrize("length", [0, wire.FRAME_BYTES + 1])
async def test_an_impossible_length_ends_the_link(length: int) -> None:
    near, far = memory_pair()
    end = End("api", near, TO_API)
    await far.send(length.to_bytes(4, "little") + b"xxxx")
    with pytest.raises(BadMessage, match=f"a frame says {length} bytes"):
        await end.link._reader.next()


async def test_a_stream_that_ends_within_a_frame_is_a_bad_message() -> None:
    near, far = memory_pair()
    await far.send(frame(1, b"abcdef")[:7])
    await far.aclose()
    with pytest.raises(BadMessage, match="ended within a frame"):
        await End("api", near, TO_API).link._reader.next()


async def test_a_message_beyond_the_frame_bound_isnt_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_BYTES", 100)
    with pytest.raises(BadMessage, match="exceeds a frame's 100"):
        Codec(RECEIVERS, {}).encode("detok", step(1, tokens=50))


@both_loops
@both_transports
async def test_a_receiver_that_doesnt_read_stops_its_sender_and_nothing_is_lost(streams: Any) -> None:
    async with linked(streams, api_size=2) as (api, rank):
        sent = 0

        async def sender() -> None:
            nonlocal sent
            for epoch in range(400):
                await rank.link.ref("detok").offer(step(epoch, tokens=2000))
                sent += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender)
            with anyio.move_on_after(0.2):
                while True:
                    await anyio.sleep(0.05)
            assert sent < 400
            got: list[int] = []
            while len(got) < 400:
                got += [out.epoch for out in await api.boxes["detok"].take()]
        assert got == list(range(400))


@both_loops
@both_transports
async def test_a_link_ends_when_the_far_end_closes_after_the_last_message(streams: Any) -> None:
    near, far = await streams()
    api, rank = End("api", near, TO_API), End("rank0", far, TO_RANK)
    await far.send(rank.link.codec.encode("detok", step(1)))
    await far.aclose()
    with anyio.fail_after(60):
        await api.run()
    assert await api.boxes["detok"].take() == [step(1)]
    await near.aclose()


@both_loops
@both_transports
async def test_a_flushed_link_has_handed_over_everything_that_was_told(streams: Any) -> None:
    near, far = await streams()
    api, rank = End("api", near, TO_API), End("rank0", far, TO_RANK)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rank.run)
        for epoch in range(30):
            await rank.link.ref("detok").offer(step(epoch))
        await rank.link.flush()
        tasks.cancel_scope.cancel()
    await rank.link.close()
    with anyio.fail_after(60):
        await api.run()
    assert [out.epoch for out in await api.boxes["detok"].take()] == list(range(30))
    await near.aclose()
