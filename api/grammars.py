"""From wishes to compiled grammars in the entries: what a request waits for before ingress hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec

from api.gate import Wish
from engine.errors import BadRequest, GrammarRefused, NotServing
from engine.grammar.gate.refusals import CODE
from engine.grammar.key import GrammarKey
from engine.grammar.service import GrammarService
from engine.messages import Entry, GrammarReady

MOST_BYTES = 32 << 20
"""Grammars of one HTTP request, a copy for each completion: they travel in one message of a link."""


def check_serving(service: GrammarService | None) -> GrammarService:
    """Raises NotServing with the reason where no grammar can be had now."""
    if service is None:
        raise NotServing("this engine has no structured output")
    if service.mailbox.closed:
        raise NotServing("the server is shutting down")
    if not service.pool.started.is_set():
        raise NotServing("the processes that compile grammars are starting")
    return service


@asynccontextmanager
async def constrained(
    service: GrammarService | None, entries: Sequence[Entry], wishes: Sequence[Wish | None]
) -> AsyncIterator[list[Entry]]:
    """The entries with the grammars that they wish for, each compiled once. Leaving early ends the wait.

    Within the block the grammars stay in the server's memory. That is as long as it takes to hand the entries
    over: a rank has its own copy, so a long answer holds no place in this cache.

    wishes  one for each entry
    raises  BadRequest (refused by the compiler, or too large), GrammarTimedOut, QueueFull, NotServing,
            GrammarFailed, MailboxFull
    """
    wanted = {wish.key: wish for wish in wishes if wish is not None}
    if not wanted:
        yield list(entries)
        return
    async with AsyncExitStack() as stack:
        found = await _all(check_serving(service), list(wanted.values()), stack)
        made = {key: (ready.value.key, msgspec.msgpack.encode(ready.value)) for key, ready in found.items()}
        whole = [
            entry if wish is None else _with(entry, wish, *made[wish.key])
            for entry, wish in zip(entries, wishes, strict=True)
        ]
        size = sum(len(entry.grammar) + len(entry.grammar_key) for entry in whole)
        if size > MOST_BYTES:
            text = f"grammars of {size} bytes for {len(whole)} completions are more than {MOST_BYTES}"
            raise BadRequest(text, next(iter(wanted.values())).param, CODE)
        yield whole


def _with(entry: Entry, wish: Wish, key: str, grammar: bytes) -> Entry:
    return msgspec.structs.replace(entry, grammar_key=key, grammar=grammar, grammar_root=wish.root)


async def _all(
    service: GrammarService, wishes: Sequence[Wish], stack: AsyncExitStack
) -> dict[GrammarKey, GrammarReady]:
    """Waits for all of them at once; the first failure ends the wait for the others."""
    found: dict[GrammarKey, GrammarReady] = {}
    failed: list[Exception] = []

    async def one(wish: Wish) -> None:
        try:
            found[wish.key] = await stack.enter_async_context(service.grammar(wish.key))
        except GrammarRefused as error:
            failed.append(BadRequest(f"{wish.param}: {error}", wish.param, CODE))
        except Exception as error:
            failed.append(error)
        if failed:
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for wish in wishes:
            tasks.start_soon(one, wish)
    if failed:
        raise failed[0]
    return found
