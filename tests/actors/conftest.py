"""The runtime's tests run on trio in virtual time; those marked by `loops` on uvloop, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio.testing

from engine.fsm.load import load, substituted
from engine.fsm.owners import module_at

VIRTUAL = "trio in virtual time"
REAL = "asyncio on uvloop"


@pytest.fixture(params=[VIRTUAL])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """trio with a clock that jumps to the next deadline as soon as every task waits, or uvloop."""
    if request.param == REAL:
        return "asyncio", {"use_uvloop": True}
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def echo() -> Iterator[ModuleType]:
    """The module of the core `Echo`; its spec is known to the loader within the test."""
    module = module_at("tests/actors/echo.py", "tests")
    with substituted(load(Path(__file__).with_name("echo.toml"))):
        yield module
