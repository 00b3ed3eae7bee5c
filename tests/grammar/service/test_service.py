"""The compile service with real worker processes: one compile a key, deadlines, crashes, limits."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from engine.actors.grammar_keys import GrammarLimits
from engine.errors import GrammarFailed, GrammarRefused, GrammarTimedOut, QueueFull
from engine.grammar.compiler import Compiler as Library
from engine.grammar.compiler import compiled_of, whole_library
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import Matcher
from engine.grammar.tokenizer_info import Vocabulary
from tests.grammar.service import stage
from tests.grammar.service.stage import WIDTH, Running, endless, patient, running, strings, vocabulary, word

Test = Callable[[Running], Coroutine[Any, Any, None]]


def serve(limits: GrammarLimits, act: Test, store: Path | None = None) -> None:
    """Runs `act` with a service."""

    async def main() -> None:
        async with running(limits, store) as found:
            await act(found)

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})


async def together(acts: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    async with anyio.create_task_group() as tasks:
        for act in acts:
            tasks.start_soon(act)


def test_sixty_four_keys_at_once_are_compiled_once_each_and_the_waiters_joined() -> None:
    limits = patient(workers=2)
    sources: Counter[str] = Counter()

    async def act(found: Running) -> None:
        async def ask(number: int) -> None:
            sources[await found.source(word(f"w{number}"))] += 1

        await together([lambda number=number: ask(number % 64) for number in range(192)])  # type: ignore[misc]
        assert found.counts["wanted"] == 192
        assert found.counts["compiles"] == found.counts["compile"] == 64
        assert found.counts["inflight"] + found.counts["memory"] == 128
        assert found.counts["inflight"] > 0
        assert await found.source(word("w5")) == "memory"
        figures = found.service.figures()
        assert figures["grammar_cache_entries"] == 64
        assert figures["num_grammar_total"] == 193
        assert found.service.counters.phases["compile"].count == 64

    serve(limits, act)
    assert sources["compile"] == 192  # Who joins gets what the compile gave.


def test_one_slow_grammar_is_abandoned_at_its_deadline_while_others_go_on() -> None:
    async def act(found: Running) -> None:
        async def others() -> None:
            await found.busy()
            for number in range(20):
                assert await found.source(word(f"w{number}")) == "compile"
            assert found.counts["timeouts"] == 0
            found.expire()

        await together([lambda: too_slow(found), lambda: too_slow(found), others])
        assert found.counts["timeouts"] == 1
        await found.until(lambda: found.counts["killed"] == 1)
        # The key isn't refused: it is compiled again, by the worker that took the killed one's place.
        await together([lambda: too_slow(found), lambda: expire_busy(found)])
        assert await found.source(word("after")) == "compile"
        await found.until(lambda: found.counts["killed"] == 2)
        assert found.service.counters.worker_ends == {"killed": 2}

    serve(patient(workers=2), act)


async def too_slow(found: Running, seed: int = 0) -> None:
    """A request whose grammar isn't compiled in time."""
    with pytest.raises(GrammarTimedOut):
        await found.source(endless(seed))


async def expire_busy(found: Running) -> None:
    """As soon as a worker has a job, its time is over."""
    await found.busy()
    found.expire()


def test_a_deadline_passes_by_the_clock() -> None:
    async def act(found: Running) -> None:
        began_s = anyio.current_time()
        await too_slow(found)
        assert anyio.current_time() - began_s >= 0.5

    serve(GrammarLimits(workers=1, timeout_s=0.5), act)


def test_who_comes_while_the_worker_is_ended_waits_for_the_next_compile_of_the_key() -> None:
    async def act(found: Running) -> None:
        async def at_the_end() -> None:
            await found.busy()
            found.expire()
            # The question is the next message behind the end, and a process takes a while to go.
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(too_slow, found)
                await found.until(lambda: found.counts["killed"] == 1)
                await expire_busy(found)

        await together([lambda: too_slow(found), at_the_end])
        assert found.counts["inflight"] == 1
        assert found.counts["timeouts"] == 2
        await found.until(lambda: found.counts["killed"] == 2)

    serve(patient(workers=1), act)


def test_a_killed_worker_is_its_requests_failure_and_is_replaced() -> None:
    async def act(found: Running) -> None:
        async def kill() -> None:
            await found.busy()
            kill_busy(found)

        async def ask() -> None:
            with pytest.raises(GrammarFailed, match="SIGKILL"):
                await found.source(endless())

        await together([ask, kill])
        assert found.counts["crashed"] == found.service.counters.worker_ends["crashed"] == 1
        assert await found.source(word("after")) == "compile"
        assert len(found.reports) == 1

    serve(patient(workers=1), act)


def test_an_idle_worker_that_dies_harms_no_request() -> None:
    async def act(found: Running) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        for worker in map(int, children.read_text().split()):
            if b"engine.grammar.worker" in Path(f"/proc/{worker}/cmdline").read_bytes():
                os.kill(worker, signal.SIGKILL)
        await found.until(lambda: found.service.counters.worker_ends["crashed"] > 0)
        assert await found.source(word("w")) == "compile"
        assert found.service.counters.worker_ends["crashed"] == 1

    serve(patient(workers=1), act)


def test_a_refusal_is_remembered_and_says_why() -> None:
    bad = GrammarKey("ebnf", "root ::= missing")

    async def act(found: Running) -> None:
        for _ in range(3):
            with pytest.raises(GrammarRefused, match="missing"):
                await found.source(bad)
        assert found.counts["refused"] == 1
        assert found.counts["refusal"] == 2
        found.expire()
        with pytest.raises(GrammarRefused):
            await found.source(bad)
        assert found.counts["refused"] == 2

    serve(patient(), act)


def test_a_client_that_leaves_ends_its_wait_and_no_other() -> None:
    """The one worker is busy: who leaves takes its key out of the queue, the other one stays in it."""

    async def act(found: Running) -> None:
        async def leave() -> None:
            with leaving:
                await found.source(strings("a"))

        async def stay() -> None:
            assert await found.source(word("a")) == "compile"

        async def busy() -> None:
            with pytest.raises(GrammarFailed):
                await found.source(endless())

        async def queued() -> None:
            await found.busy()
            await together([leave, stay])

        async def free() -> None:
            await found.queued(2)
            leaving.cancel()
            await found.queued(1)
            kill_busy(found)

        leaving = anyio.CancelScope()
        await together([busy, queued, free])
        core = found.service.cores[-1]
        assert strings("a").wire() not in core.keys.place_of
        assert not core.waits
        assert not core.reads
        assert found.counts["compiles"] == 1

    serve(patient(workers=1), act)


def kill_busy(found: Running) -> None:
    """Ends the one worker that has a job."""
    (worker,) = found.service.pool.running.values()
    os.kill(worker.child.process.pid, signal.SIGKILL)


def test_a_full_queue_refuses_at_once() -> None:
    async def act(found: Running) -> None:
        async def refused() -> None:
            await found.queued(1)
            with pytest.raises(QueueFull):
                await found.source(word("a"))
            found.expire()

        await together([lambda: too_slow(found, 1), lambda: too_slow(found, 2), refused])

    serve(patient(workers=1, queued=1), act)


def test_memory_stays_within_entries_and_bytes() -> None:
    async def act(found: Running) -> None:
        for number in range(30):
            await found.source(word(f"w{number}"))
            figures = found.service.figures()
            assert figures["grammar_cache_entries"] <= 4
            assert figures["grammar_cache_bytes"] <= 20_000
        assert figures['grammar_cache_evictions_total{reason="entries"}'] > 0
        # Four entries are read: a fifth is given, and not kept.
        async with anyio.create_task_group() as tasks:
            for number in range(26, 30):
                await tasks.start(_hold, found, word(f"w{number}"))
            assert await found.source(word("fifth")) == "compile"
            assert await found.source(word("fifth")) == "compile"
            assert found.counts["unkept"] == 2
            tasks.cancel_scope.cancel()

    serve(patient(cache_entries=4, cache_bytes=20_000), act)


async def _hold(found: Running, key: GrammarKey, *, task_status: TaskStatus[None]) -> None:
    async with found.service.grammar(key):
        task_status.started()
        await anyio.sleep_forever()


def test_every_artifact_is_loaded_to_the_same_masks_as_a_compile_here(tmp_path: Path) -> None:
    keys = [strings("a"), word("b")]
    artifacts = []

    async def act(found: Running) -> None:
        for key in keys:
            async with found.service.grammar(key) as ready:
                artifacts.append(ready.value)

    serve(patient(), act, tmp_path / "store")
    library = Library(vocabulary(), whole_library())
    for key, artifact in zip(keys, artifacts, strict=True):
        assert library.probe(library.compile(key)) == artifact.probe
        matcher = Matcher(compiled_of(library.load(artifact)), WIDTH)
        assert not matcher.terminated


def test_a_library_that_is_not_the_expected_one_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary without letters stands for it: the worker's check finds nothing that it knows."""
    empty = Vocabulary((b"\xff",) * 31 + (b"",), (31,))
    monkeypatch.setattr(stage, "vocabulary", lambda: empty)

    async def act(found: Running) -> None:
        raise AssertionError("it started")

    with pytest.raises(ExceptionGroup) as caught:
        serve(patient(), act)
    # The worker's own words, and not how it ended.
    why = r"doesn't start: ConfigError: .*|doesn't start: GrammarRefused: .*"
    assert caught.group_contains(GrammarFailed, match=why, depth=3) or caught.group_contains(
        GrammarFailed, match=why
    )
