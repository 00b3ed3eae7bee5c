"""The example machine and its two searches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fsm.load import load, substituted
from engine.fsm.owners import ROOT
from engine.fsm.search import Search, load_search
from engine.fsm.spec import Spec

FOLDER = Path(__file__).parent


@pytest.fixture
def oven() -> Iterator[Spec]:
    spec = load(ROOT / "tests" / "specs" / "data" / "oven.toml")
    with substituted(spec):
        yield spec


@pytest.fixture
def kitchen(oven: Spec) -> Search:
    return load_search(FOLDER / "kitchen.toml")


@pytest.fixture
def silence(oven: Spec) -> Search:
    return load_search(FOLDER / "silence.toml")
