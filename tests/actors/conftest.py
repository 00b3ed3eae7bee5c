"""The runtime's tests run on trio in virtual time; some on uvloop and on trio in real time, too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio.testing
from hypothesis.internal.entropy import deterministic_PRNG

from engine.config import NANO
from engine.fsm.load import load, substituted
from engine.fsm.owners import module_at
from tests.actors.loops import REAL, REAL_TRIO, VIRTUAL


@pytest.fixture
def order() -> int:
    """Seeds the order in which trio runs tasks that are ready at once; what any order must bear has more."""
    return 0


@pytest.fixture(params=[VIRTUAL])
def anyio_backend(request: pytest.FixtureRequest, order: int) -> Iterator[Any]:
    """trio with a clock that jumps to the next deadline as soon as every task waits, or uvloop."""
    if request.param == REAL:
        yield "asyncio", {"use_uvloop": True}
    elif request.param == REAL_TRIO:
        yield "trio", {}
    else:
        # Without a seed trio draws orders from the process's own, and a failure can't be had again.
        with deterministic_PRNG(order):
            yield "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with everything but weights."""
    folder = tmp_path_factory.mktemp("model") / "nano"
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(Path(__file__).with_name("geometry.json"), folder / "config.json")
    return folder


@pytest.fixture
def echo() -> Iterator[ModuleType]:
    """The module of the core `Echo`; its spec is known to the loader within the test."""
    module = module_at("tests/actors/echo.py", "tests")
    with substituted(load(Path(__file__).with_name("echo.toml"))):
        yield module
