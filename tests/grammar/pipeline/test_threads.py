"""The whole engine: grammars are compiled beside the loop and the device thread, which go on meanwhile.

Shown by what waits for what, not by the clock: a compile ends only once other requests have gone on.
"""

from __future__ import annotations

import threading
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from api.served import load_served
from engine.config import NANO, Settings
from engine.grammar.compiler import Compiler, whole_library
from engine.grammar.key import GrammarKey
from engine.local import engine_of
from engine.messages import LENGTH, STOP_EOS, Entry, GrammarArtifact, Sampling
from engine.rank_parts import ModelParts
from tests.grammar.pipeline.stage import WORDS, artifact, follows, tokenizer
from tests.grammar.service.stage import endless, vocabulary

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The loop that ranks have."""
    return "asyncio"


FEW = 5
"""Chunks that come within the library's call and again after it. None would come while the call kept the
interpreter, or the loop or the device thread waited for it or made it."""

HUNG_S = 30.0
FREE_TOKENS = 40


class Chunks:
    """Counts the chunks of requests that have no grammar."""

    def __init__(self) -> None:
        self.count = 0
        self._came = threading.Condition()

    def add(self) -> None:
        """One more; called on the loop."""
        with self._came:
            self.count += 1
            self._came.notify_all()

    def wait_for(self, count: int) -> bool:
        """Blocks its thread until there are so many; False where they don't come."""
        with self._came:
            return self._came.wait_for(lambda: self.count >= count, HUNG_S)


class Traced:
    """The library's compiles: who made them and, for one key, what came meanwhile.

    threads  names of those that compiled
    during   chunks that came within the call        after  whether more came before the compile ended
    """

    def __init__(self, key: GrammarKey, chunks: Chunks) -> None:
        self.threads: list[str] = []
        self.during = 0
        self.after = False
        self._key = key
        self._chunks = chunks
        self._compile = Compiler.compile

    def compile(self, compiler: Compiler, key: GrammarKey) -> Any:
        """In place of `Compiler.compile`."""
        self.threads.append(threading.current_thread().name)
        if key != self._key:
            return self._compile(compiler, key)
        before = self._chunks.count
        handle = self._compile(compiler, key)
        self.during = self._chunks.count - before
        self.after = self._chunks.wait_for(self._chunks.count + FEW)
        return handle


def entry(text: str, key: GrammarKey | None, grammar: bytes, most: int) -> Entry:
    prompt = np.array(tokenizer().encode(text), np.int32).tobytes()
    how = Sampling(most, temperature=0.0, ignore_eos=key is None)
    wire = "" if key is None else key.wire()
    return Entry(sink=0, prompt=prompt, sampling=how, grammar_key=wire, grammar=grammar)


async def stream(engine: Any, one: Entry, chunks: Chunks | None = None) -> tuple[list[int], int]:
    """Tokens and finish code; each chunk is counted as it comes."""
    group = await engine.submit([one])
    tokens: list[int] = []
    finish = 0
    while taken := await group.take():
        for delta in taken:
            tokens += delta.token_ids
            finish = delta.finish
            if chunks is not None:
                chunks.add()
    return tokens, finish


async def test_nobody_waits_for_a_grammar_but_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, words, chunks = endless(depth=230), artifact(WORDS), Chunks()
    fresh = Compiler(vocabulary(), whole_library())
    handle = fresh.compile(slow)
    probe = fresh.probe(handle)
    made = GrammarArtifact(slow.wire(), b"", 0, probe, int(handle.memory_size_bytes()), 1.0, 0.0)
    traced = Traced(slow, chunks)
    monkeypatch.setattr(Compiler, "compile", lambda self, key: traced.compile(self, key))
    settings = Settings(
        model_path=str(NANO),
        threads=1,
        max_running_requests=4,
        max_total_tokens=4096,
        grammar_timeout_s=4 * HUNG_S,
    )
    found: dict[str, tuple[list[int], int]] = {}
    free: list[tuple[list[int], int]] = []
    async with engine_of(settings, load_served(settings, 0), ModelParts()) as engine:
        traced.threads.clear()

        async def one(name: str, item: Entry) -> None:
            found[name] = await stream(engine, item)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "slow", entry("A list:", slow, msgspec.msgpack.encode(made), 8))
            tasks.start_soon(one, "quick", entry("Say", WORDS, words, 40))
            # New requests are taken and answered throughout, as long as the slow one waits.
            while "slow" not in found:
                free.append(await stream(engine, entry("Once upon a time", None, b"", FREE_TOKENS), chunks))
    assert len(traced.threads) == 2
    assert all(name.startswith("grammar loader") for name in traced.threads)
    assert traced.during >= FEW
    assert traced.after
    assert follows(WORDS, found["quick"][0])
    assert found["quick"][1] == STOP_EOS
    assert found["slow"][0]
    assert all((len(tokens), finish) == (FREE_TOKENS, LENGTH) for tokens, finish in free)
