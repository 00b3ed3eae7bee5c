"""A rank's end lets go of the threads that make matchers and masks, whatever they do."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
import torch

from engine.actors.mailbox import Mailbox
from engine.actors.timers import Timers
from engine.config import NANO, Settings
from engine.grammar.rank_grammars import rank_grammars
from engine.loaded import Loaded
from engine.rank_parts import ModelParts

pytestmark = pytest.mark.anyio
OWN = "grammar"
"""How the names of the threads begin."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(OWN)}


@pytest.mark.parametrize("busy", [False, True])
async def test_a_released_rank_has_no_thread_for_grammars_and_waits_for_none_that_is_stuck(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.rank_parts.LOADER_S", 0.5 if busy else 60.0)
    settings = Settings()
    before = own_threads()
    grammars = rank_grammars(NANO, 8192, [1], torch.device("cpu"), slots=3, width=1)
    assert grammars is not None
    await anyio.to_thread.run_sync(lambda: grammars.compiler)
    parts, unused = ModelParts(), Any
    loaded = Loaded(unused, unused, unused, (1,), grammars=grammars)
    matchers: Any = parts.matchers(settings, loaded, Mailbox("rank0", 16, "reject"), Timers())
    end, begun = threading.Event(), threading.Event()
    matchers.loader._threads.submit(lambda: (begun.set(), busy and end.wait()))
    matchers.pipeline._thread.lane.submit(begun.wait).result()
    assert len(own_threads() - before) >= 2
    with anyio.fail_after(60):
        await parts.release("graphs")
    assert bool(own_threads() - before) == busy
    await parts.release("graphs")
    end.set()
    while own_threads() - before:
        await anyio.sleep(0.01)
