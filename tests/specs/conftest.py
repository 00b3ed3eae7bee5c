"""The example machine under its name, for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fsm.load import load, substituted
from engine.fsm.spec import Spec

DATA = Path(__file__).parent / "data"


@pytest.fixture
def oven() -> Iterator[Spec]:
    spec = load(DATA / "oven.toml")
    with substituted(spec):
        yield spec
