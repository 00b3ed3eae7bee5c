"""The whole engine: grammars are compiled beside the loop and the device thread, which go on meanwhile."""

from __future__ import annotations

import threading
import time
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
from engine.messages import STOP_EOS, Entry, GrammarArtifact, Sampling
from engine.rank_parts import ModelParts
from tests.grammar.pipeline.stage import WORDS, artifact, follows, tokenizer
from tests.grammar.service.stage import endless, vocabulary

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The loop that ranks have."""
    return "asyncio"


SHARE = 2 / 3
"""Longest silence of a free stream in terms of the compile; where the loop or the device thread compiled, the
stream would be silent for all of it."""


def entry(text: str, key: GrammarKey | None, grammar: bytes, most: int) -> Entry:
    prompt = np.array(tokenizer().encode(text), np.int32).tobytes()
    how = Sampling(most, temperature=0.0, ignore_eos=key is None)
    wire = "" if key is None else key.wire()
    return Entry(sink=0, prompt=prompt, sampling=how, grammar_key=wire, grammar=grammar)


async def stream(engine: Any, one: Entry) -> tuple[list[int], int, list[float]]:
    """Tokens, finish code, and when each chunk came."""
    group = await engine.submit([one])
    tokens: list[int] = []
    times: list[float] = []
    finish = 0
    while taken := await group.take():
        for delta in taken:
            tokens += delta.token_ids
            finish = delta.finish
            times.append(time.perf_counter())
    return tokens, finish, times


async def test_nobody_waits_for_a_grammar_but_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, words = endless(depth=170), artifact(WORDS)
    fresh = Compiler(vocabulary(), whole_library())
    handle = fresh.compile(slow)
    probe = fresh.probe(handle)
    made = GrammarArtifact(slow.wire(), b"", 0, probe, int(handle.memory_size_bytes()), 1.0, 0.0)
    compiled: list[tuple[str, float, float]] = []
    compile_ = Compiler.compile

    def traced(self: Compiler, key: GrammarKey) -> Any:
        began = time.perf_counter()
        try:
            return compile_(self, key)
        finally:
            compiled.append((threading.current_thread().name, began, time.perf_counter()))

    monkeypatch.setattr(Compiler, "compile", traced)
    settings = Settings(model_path=str(NANO), threads=1, max_running_requests=4, max_total_tokens=4096)
    async with engine_of(settings, load_served(settings, 0), ModelParts()) as engine:
        compiled.clear()
        found: dict[str, tuple[list[int], int, list[float]]] = {}

        async def one(name: str, item: Entry) -> None:
            found[name] = await stream(engine, item)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "free", entry("Once upon a time", None, b"", 150))
            await anyio.sleep(0.1)
            tasks.start_soon(one, "slow", entry("A list:", slow, msgspec.msgpack.encode(made), 8))
            tasks.start_soon(one, "quick", entry("Say", WORDS, words, 40))
    names = {name for name, _, _ in compiled}
    assert names
    assert all(name.startswith("grammar loader") for name in names)
    _, began, ended = max(compiled, key=lambda one: one[2] - one[1])
    times = [began, *(at for at in found["free"][2] if began < at < ended), ended]
    assert len(times) > 5
    assert max(np.diff(times)) < SHARE * (ended - began)
    assert follows(WORDS, found["quick"][0])
    assert found["quick"][1] == STOP_EOS
    assert len(found["free"][0]) == 150
    assert found["slow"][0]
