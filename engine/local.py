"""The whole engine in one process, without HTTP: the same actors over an in-memory link."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from api.handle import Engine
from api.served import Served, load_served
from engine.actors.links import Link, memory_pair
from engine.actors.process import Process, report_to_stderr
from engine.actors.wiring import wiring
from engine.allocator import keep_freed_memory
from engine.config import Settings
from engine.front import start_front, start_grammars
from engine.messages import Message, Stop
from engine.rank_interface import Parts, Told
from engine.rank_parts import ModelParts
from engine.rank_process import GREET_S, run_rank
from engine.threads import environment


class Ups:
    """The actor name `launcher` of a process that starts no other: hears that the rank is up."""

    def __init__(self) -> None:
        self.all_up = anyio.Event()

    def tell(self, msg: Message) -> None:
        """Takes RankUp."""
        self.all_up.set()

    async def offer(self, msg: Message) -> None:
        """As `tell`."""
        self.tell(msg)


def local_engine(settings: Settings, grammars: bool = False) -> AbstractAsyncContextManager[Engine]:
    """The engine of these settings, as `engine_of`; before it call `prepare_environment`."""
    return engine_of(settings, load_served(settings, int(time.time())), ModelParts(), grammars)


@asynccontextmanager
async def engine_of(
    settings: Settings, served: Served, parts: Parts, grammars: bool = False
) -> AsyncIterator[Engine]:
    """An engine that is ready; leaving it stops the rank, which ends what still runs.

    grammars  it takes constrained requests, for which it starts processes that compile
    raises  a group with what ended the rank: ConfigError, CheckpointError, DeviceFailed, ActorFailed
    """
    near, far = memory_pair()
    async with anyio.create_task_group() as tasks:
        api = Process("api", wiring(), tasks, report_to_stderr)
        rank = Process("rank", wiring(), tasks, report_to_stderr)
        ups = api.refs["launcher"] = Ups()
        to_rank, to_api = api.link("api", "rank0", near), rank.link("rank0", "api", far)
        rank.mailbox("rank0")
        compiled = start_grammars(api, settings, served) if grammars else None
        engine = start_front(api, settings, served, lambda snapshot: None, grammars=compiled)
        async with anyio.create_task_group() as greetings:
            greetings.start_soon(to_rank.greet, GREET_S)
            greetings.start_soon(to_api.greet, GREET_S)
        tasks.start_soon(api.run_link, to_rank)
        tasks.start_soon(rank.run_link, to_api)
        stopped = anyio.Event()
        tasks.start_soon(_run, Told(0, settings), rank, to_api, parts, stopped)
        await ups.all_up.wait()
        if compiled is not None:
            await compiled.pool.started.wait()
        try:
            yield engine
            to_rank.ref("rank").tell(Stop("the program has its answers"))
            await stopped.wait()
        finally:
            tasks.cancel_scope.cancel()


async def _run(told: Told, rank: Process, link: Link, parts: Parts, stopped: anyio.Event) -> None:
    await run_rank(told, rank, link, parts)
    stopped.set()


def prepare_environment(settings: Settings) -> None:
    """Says how compute threads wait, and keeps freed memory; must run before torch is imported.

    What the user has set stays.
    """
    keep_freed_memory()
    for name, value in environment(settings.threads).items():
        os.environ.setdefault(name, value)
