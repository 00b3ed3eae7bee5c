"""A compile service with real workers over the shipped vocabulary."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio

from engine.actors.grammar_keys import GrammarLimits
from engine.actors.process import Process
from engine.actors.wiring import wiring
from engine.config import NANO
from engine.grammar.key import GrammarKey
from engine.grammar.service import GrammarService, start_service
from engine.grammar.tokenizer_info import Vocabulary, vocabulary_of
from engine.grammar.worker import WorkerSettings
from engine.messages import Tick
from engine.model.tokenizer import load_tokenizer

WIDTH, STOP = 8192, 1
PATIENT_S = 100.0


@cache
def vocabulary() -> Vocabulary:
    """Of the shipped model."""
    return vocabulary_of(load_tokenizer(NANO), WIDTH, [STOP])


def word(text: str) -> GrammarKey:
    """A small grammar: one word in quotes."""
    return GrammarKey("ebnf", f'root ::= "{text}" [a-z]*')


def wide(fields: int) -> GrammarKey:
    """A grammar that takes longer to load than to compile: its serial form is many times its size."""
    return GrammarKey("ebnf", "root ::= " + " ".join(f'("k{one}")?' for one in range(fields)))


def strings(name: str) -> GrammarKey:
    """A grammar whose free strings make it worth loading."""
    rule = r'string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""'
    return GrammarKey("ebnf", f'root ::= "{name}" string\n{rule}')


def endless(seed: int = 0, depth: int = 600) -> GrammarKey:
    """A grammar that compiles for half a minute; of depth 200, for a second."""
    schema: dict[str, object] = {"type": "integer", "minimum": seed}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    body = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return GrammarKey("structural_tag", json.dumps(body))


def patient(**more: Any) -> GrammarLimits:
    """Limits under which only `Running.expire` makes anything late, on however busy a host."""
    return GrammarLimits(timeout_s=PATIENT_S, **more)


class Running:
    """A service, and what its workers' failures were reported as."""

    def __init__(self, service: GrammarService, reports: list[str]) -> None:
        self.service = service
        self.reports = reports

    @property
    def counts(self) -> dict[str, int]:
        """Of the core."""
        return self.service.cores[-1].counts

    async def source(self, key: GrammarKey) -> str:
        """Where the key's grammar came from."""
        async with self.service.grammar(key) as ready:
            assert ready.value.key == key.wire()
            return ready.source

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for it."""
        with anyio.fail_after(PATIENT_S):
            while not holds():
                await anyio.sleep(0.005)

    async def finished(self, jobs: int) -> None:
        """Once the disk has what so many jobs have for it."""
        await self.until(lambda: self.service.counters.finished >= jobs)

    async def busy(self) -> None:
        """Once a worker has a job."""
        await self.until(lambda: bool(self.service.pool.running))

    async def queued(self, keys: int) -> None:
        """Once so many keys wait for a worker, and one has a job."""
        await self.busy()
        await self.until(lambda: len(self.service.cores[-1].keys.queue) == keys)

    def expire(self) -> None:
        """As the clock would say when all that waits has waited too long, and refusals are forgotten."""
        limits = self.service.limits
        later_s = anyio.current_time() + limits.timeout_s + limits.refusal_s
        self.service.mailbox.tell(Tick(later_s))


@asynccontextmanager
async def running(limits: GrammarLimits, store: Path | None = None, **more: int) -> AsyncIterator[Running]:
    """A service whose workers are up."""
    reports: list[str] = []
    async with anyio.create_task_group() as tasks:
        process = Process("api", wiring(), tasks, reports.append)
        settings = WorkerSettings(vocabulary(), str(store) if store else "", **more)
        service = start_service(process, limits, settings)
        with anyio.fail_after(PATIENT_S):
            await service.pool.started.wait()
        yield Running(service, reports)
        tasks.cancel_scope.cancel()
