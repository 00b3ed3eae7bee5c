"""One rank's process: core on the loop thread, model on the device thread, one link to the api process.

It ends when its core has stopped, when anything of it fails, and when the api process is gone.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

import anyio
import msgspec
from anyio.abc import SocketStream

from engine import errors
from engine.actors.device import Device, StepRunner, name_thread
from engine.actors.links import Link
from engine.actors.mailbox import Mailbox
from engine.actors.process import Process, log_to_stderr, report_to_stderr
from engine.actors.wire import ByteStream
from engine.actors.wiring import Wiring, wiring
from engine.board import board_of
from engine.children import die_with_parent, leave_signals_to_parent
from engine.errors import ActorFailed, DeviceFailed, EngineError
from engine.exchange import Exchange
from engine.exchange.meter import ExchangeMeter
from engine.lifecycle_box import report, writer_of
from engine.lifecycle_pulse import Pulse, begin_to_beat, pulse_of, timed_delivery, timed_submission
from engine.lifecycle_release import release
from engine.messages import Message, RankUp, Stop
from engine.peers import join_by_exchange, join_by_links
from engine.rank_figures import Join, RankFigures
from engine.rank_interface import Parts, Told

LOG = logging.getLogger("engine.rank")
GREET_S = 30.0
JOIN_S = 2.0
FLUSH_S = 5.0
CLEAN, FAILED, ORPHANED = 0, 1, 3
"""Exit codes: the core stopped; something failed and was reported; the api process is gone."""


def run_process(descriptor: int, parts: Parts) -> None:
    """Runs the rank that standard input describes; `descriptor` is its end of the link. Ends the process.

    Whatever threads remain then: a device that hangs must not keep the process.
    """
    leave_signals_to_parent()
    die_with_parent()
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=Told)
    log_to_stderr(told.settings.log_level, told.settings.log_format)
    name_thread(f"rank{told.rank}")
    sock = socket.socket(fileno=descriptor)
    code = anyio.run(_main, told, sock, parts, backend="asyncio", backend_options={"use_uvloop": True})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _main(told: Told, sock: socket.socket, parts: Parts) -> int:
    stream = await SocketStream.from_socket(sock)
    figures = RankFigures(told.rank)
    way = await _way_to_peers(told, figures.exchange)
    say = report_to_stderr if told.box < 0 else writer_of(told.box)
    return await live(told, stream, parts, wiring(), say, figures.watching(way))


async def _way_to_peers(told: Told, meter: ExchangeMeter) -> Join:
    """What connects this rank to the others, as the settings say."""
    settings = told.settings
    if settings.dp_size == 1:
        return lambda process: None
    if settings.dp_exchange == "native":
        from engine.exchange.native import NativeExchange

        exchange = partial(NativeExchange, told.session, told.rank, settings.watchdog_s)
        return join_by_exchange(told.rank, settings.dp_size, exchange, meter)
    if settings.dp_exchange == "collective":
        return join_by_exchange(told.rank, settings.dp_size, partial(_collective, told), meter)
    ends = {peer: socket.socket(fileno=descriptor) for peer, descriptor in told.peers.items()}
    streams = {peer: await SocketStream.from_socket(end) for peer, end in ends.items()}
    return join_by_links(told.rank, streams, meter)


def _collective(told: Told) -> Exchange:
    """Imports torch, a second for which the link's greeting must not wait: call it on a thread."""
    from engine.exchange.collective import CollectiveExchange
    from engine.exchange.gloo import open_group

    group = open_group(told.rank, told.settings.dp_size, told.session)
    return CollectiveExchange(group, told.settings.watchdog_s)


async def live(
    told: Told,
    stream: ByteStream,
    parts: Parts,
    plan: Wiring,
    say: Callable[[str], None],
    join: Join,
) -> int:
    """The whole life of a rank's process; returns its exit code.

    stream  to the api process
    say     prints what goes wrong
    join    is called with the process before its link is open, to connect it to other ranks
    """
    name = f"rank{told.rank}"
    code = CLEAN
    process: Process | None = None
    try:
        async with anyio.create_task_group() as tasks:
            process = Process("rank", plan, tasks, say)
            link = process.link(name, "api", stream)
            joined = join(process)
            await link.greet(GREET_S)

            async def until_the_api_is_gone() -> None:
                nonlocal code
                await process.run_link(link)
                code = ORPHANED
                tasks.cancel_scope.cancel()

            process.mailbox(name)
            tasks.start_soon(until_the_api_is_gone)
            await run_rank(told, process, link, parts, joined)
            tasks.cancel_scope.cancel()
    except* Exception as group:
        report(name, group, say)
        if process is not None and group.subgroup(ActorFailed) is None:
            say(process.recorders())
        code = FAILED
    return code


async def run_rank(
    told: Told, process: Process, link: Link, parts: Parts, joined: anyio.Event | None = None
) -> None:
    """Loads the rank, says that it is up, runs it until its core stops, and hands over its last words.

    joined  is set when the way to the peers is open, or is known to be closed; None: there are no peers, or
            the way is open from the start
    raises  an exception group: DeviceFailed, ActorFailed, with their causes
    """
    settings = told.settings
    parts.place(told.rank, told.meeting)
    process.refs["board"] = board_of(told.board, settings.dp_size)
    pulse = pulse_of(told.pulse, told.rank, settings.dp_size, settings.watchdog_s)
    begin_to_beat(process.timers, pulse, parts.wall_s)
    if await _serve(told, process, link, parts, joined, pulse):
        await _let_go(f"rank{told.rank}", process, parts, pulse)


async def _serve(
    told: Told, process: Process, link: Link, parts: Parts, joined: anyio.Event | None, pulse: Pulse
) -> bool:
    """The scheduler's life; whether there was a model. With this frame goes all that refers to it."""
    name = f"rank{told.rank}"
    settings = told.settings
    mailbox = process.mailbox(name)
    async with anyio.create_task_group() as tasks:
        deliver = timed_delivery(pulse, mailbox.tell_first)
        device = parts.device(lambda: parts.load(settings, sayer(name)), deliver, process.timers)
        tasks.start_soon(device.run, JOIN_S)
        runner = await _loaded(device, mailbox, joined)
        if runner is None:
            tasks.cancel_scope.cancel()
            return False
        # What imports and builds for long comes before the rank says that it is up.
        process.refs["matchers"] = parts.matchers(settings, runner, mailbox, process.timers)
        core = parts.core(settings, told.rank, runner)
        parts.settle()
        for listener in ("ingress", "launcher"):
            await link.ref(listener).offer(RankUp(told.rank))
        process.tick(name, settings.snapshot_s, parts.wall_s)
        reason = await process.keep(name, lambda: core, timed_submission(pulse, device.submit))
        if core.state == "lost":
            raise _error_named(reason)
        if core.state != "stopped":
            # Silence has no traceback of its own: where every thread stands is all there is to see.
            parts.dump()
            raise DeviceFailed(f"{name} ended in state {core.state}: {reason}")
        with anyio.move_on_after(FLUSH_S):
            await process.flush()
        tasks.cancel_scope.cancel()
    return True


async def _let_go(name: str, process: Process, parts: Parts, pulse: Pulse) -> None:
    """In order, behind the last step. raises DeviceFailed where something doesn't go"""
    fault, took_s = await release(process, True, parts.release, pulse)
    spent = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in took_s.items())
    LOG.info("%s released %s", name, spent)
    if fault:
        raise DeviceFailed(f"{name} didn't let go of all: {fault}")


def _error_named(reason: str) -> EngineError:
    """The error of `PeerDown`: its class, then its text."""
    kind, _, text = reason.partition(": ")
    found: type[EngineError] = getattr(errors, kind)
    return found(text)


async def _loaded(device: Device, mailbox: Mailbox, joined: anyio.Event | None) -> StepRunner | None:
    """The runner, when the way to the peers is open, too; None where the rank is told to stop before.

    A request that came sooner would wait for the peers on the watchdog's time.

    Peers that were faster may have begun the first round: what they sent is kept for the core. They end
    without this rank when they hear of its end, since no step was ever agreed.
    """
    runner: StepRunner | None = None
    early: list[Message] = []
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            nonlocal runner
            runner = await device.runner()
            if joined is not None:
                await joined.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(wait)
        while not any(isinstance(msg, Stop) for msg in early):
            early += await mailbox.take()
        tasks.cancel_scope.cancel()
    mailbox.put_back(early)
    return runner


def sayer(name: str) -> Callable[[str], None]:
    """Prints a line of progress with the process's name before it."""
    return lambda text: report_to_stderr(f"{name}: {text}")
