"""Searches with a fault planted in a core."""

from __future__ import annotations

import pytest

from engine.actors import core
from engine.fsm.explore import Explorer, Violation
from engine.fsm.owners import SPECS
from engine.fsm.search import Search, load_search


def explored(search: Search | str, monkeypatch: pytest.MonkeyPatch) -> Violation:
    """What the search, or the one of this name, finds; it has to find something."""
    monkeypatch.setattr(core, "_tables", {})  # Compiled tables hold the sound guards and actions.
    if isinstance(search, str):
        search = load_search(SPECS / "search" / f"{search}.toml")
    violation = Explorer(search).run().violation
    assert violation is not None
    return violation
